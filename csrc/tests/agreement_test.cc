// SPDX-License-Identifier: Apache-2.0
#include "agreement.h"

#include <string>

#include "check.h"
#include "errors.h"

namespace torchbeast {
namespace {

rpcenv::Handshake handshake(const std::string& spaces, uint32_t num_envs = 2,
                            const std::string& env = "") {
  rpcenv::Handshake message;
  message.set_spaces(spaces);
  message.set_num_envs(num_envs);
  message.set_env(env);
  return message;
}

std::string refusal(Agreement& agreement, const rpcenv::Handshake& message) {
  try {
    agreement.check_handshake("far:1", message);
  } catch (const RefusedError& error) {
    CHECK(std::string(error.what()).find("far:1") != std::string::npos);
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(what_is_not_given_is_as_the_first_server_has_it) {
  Agreement agreement({{}, {}, ""});
  CHECK(refusal(agreement, handshake("1", 2)).empty());
  CHECK(refusal(agreement, handshake("1", 2)).empty());
  CHECK(contains(refusal(agreement, handshake("2", 2)), "is 2, expected 1"));
  CHECK(contains(refusal(agreement, handshake("1", 3)), "has 3 environments a stream, expected 2"));
}

TEST(what_is_given_holds_for_the_first_server_too) {
  Agreement agreement({"1", 2, "Pong"});
  CHECK(!refusal(agreement, handshake("2", 2, "Pong")).empty());
  CHECK(!refusal(agreement, handshake("1", 3, "Pong")).empty());
  CHECK(contains(refusal(agreement, handshake("1", 2, "Asterix")), "plays Asterix, expected Pong"));
  CHECK(refusal(agreement, handshake("1", 2, "Pong")).empty());
}

TEST(servers_that_name_no_environment_are_accepted_and_decide_nothing) {
  Agreement agreement({{}, {}, ""});
  CHECK(refusal(agreement, handshake("1", 2)).empty());
  CHECK(refusal(agreement, handshake("1", 2, "Pong")).empty());
  CHECK(refusal(agreement, handshake("1", 2)).empty());
  CHECK(!refusal(agreement, handshake("1", 2, "Asterix")).empty());
}

TEST(a_refused_server_decides_nothing) {
  Agreement agreement({"1", {}, ""});
  CHECK(!refusal(agreement, handshake("2", 3, "Asterix")).empty());
  CHECK(refusal(agreement, handshake("1", 2, "Pong")).empty());
}

TEST(rows_must_be_alike) {
  Agreement agreement({{}, {}, ""});
  const Array a = int64_array({1, 2}, {1, 2});
  agreement.check_row("near:1", Nest<Array>::Tuple{a, a});
  agreement.check_row("near:1", Nest<Array>::Tuple{a, int64_array({1, 2}, {3, 4})});
  for (const Nest<Array>& row : {Nest<Array>(a), Nest<Array>(Nest<Array>::Tuple{a, {a}, a}),
                                 Nest<Array>(Nest<Array>::Tuple{a, Nest<Array>::Tuple{a}}),
                                 Nest<Array>(Nest<Array>::Dict{{"a", a}, {"b", a}}),
                                 Nest<Array>(Nest<Array>::Tuple{a, int64_array({1, 1}, {1})})}) {
    CHECK_THROWS(RefusedError, (agreement.check_row("far:1", row), 0));
  }
}

TEST(of_spaces_the_difference_is_shown) {
  const std::string space = R"({"observation": {"shape": [4, 84, 84], "type": "Box"}, "action": )";
  const std::string expected = space + R"({"n": 4}})";
  CHECK(describe_difference(space + R"({"n": 6}})", expected) == "action.n is 6, expected 4");
  CHECK(describe_difference(space + R"({"m": 4}})", expected) ==
        "action.m is not expected; action.n is missing");
  CHECK(describe_difference(space + "[4]}", expected) ==
        "action[0] is not expected; action.n is missing");
  CHECK(describe_difference("[[1, 2], 3]", "[[1, 4], 5]") ==
        "[0][1] is 2, expected 4; [1] is 3, expected 5");
  CHECK(describe_difference(R"({"a \" : [": "b,\"", "c": 1})", R"({"a \" : [": "b,\"", "c": 2})") ==
        "c is 1, expected 2");
  CHECK(describe_difference("", "[1]") == "they are none, expected [1]");
  CHECK(describe_difference("[1]", "[ 1]") == "they are [1], expected [ 1]");
  // However much differs, and whatever it is, the message stays short.
  CHECK(describe_difference("[1,1,1,1,1]", "[0,0,0,0,0]").size() < 100);
  for (const char c : {'[', '{', '"', ':', '\\', 'x', ',', ']'}) {
    for (const size_t length : {1, 50, 19'000, 1'000'000}) {
      CHECK(describe_difference(std::string(length, c), expected).size() < 1000);
    }
  }
}

}  // namespace
}  // namespace torchbeast
