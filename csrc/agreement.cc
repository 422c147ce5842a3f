// SPDX-License-Identifier: Apache-2.0
#include "agreement.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "errors.h"
#include "wire.h"

namespace torchbeast {

namespace {

constexpr size_t kMaxDifferences = 3;  // differences that a message names
constexpr size_t kMaxTextLength = 200;
constexpr size_t kMaxJsonLength = 20'000;  // longer texts are not parsed

// A text such as ({a: uint8[1, 2]}, float32[1]).
std::string text_of(const Nest<std::string>& nest) {
  if (nest.is_leaf()) return nest.leaf();
  std::string text;
  if (nest.is_tuple()) {
    for (const auto& item : nest.tuple()) text += (text.empty() ? "" : ", ") + text_of(item);
    return "(" + text + ")";
  }
  for (const auto& [key, item] : nest.dict()) {
    text += (text.empty() ? "" : ", ") + key + ": " + text_of(item);
  }
  return "{" + text + "}";
}

std::string shorten(std::string text) {
  if (text.empty()) return "none";
  if (text.size() > kMaxTextLength) text = text.substr(0, kMaxTextLength) + "...";
  return text;
}

// The values in a JSON text by their places: {"action.n": "6", "observation.shape[0]": "4"}. For a
// text that is not JSON the result is arbitrary.
std::map<std::string, std::string> values_of(const std::string& json) {
  struct Level {
    std::string place;
    int index;  // position in a list; -1 for a dict
    std::string key;
  };
  std::map<std::string, std::string> values;
  std::vector<Level> levels{{"", -1, ""}};
  const auto place = [&] {
    const auto& [outer, index, key] = levels.back();
    if (index >= 0) return outer + "[" + std::to_string(index) + "]";
    return outer.empty() ? key : outer + "." + key;
  };
  if (json.size() > kMaxJsonLength) return {};
  size_t begin = 0;
  while ((begin = json.find_first_not_of(" \n:", begin)) != std::string::npos) {
    const char c = json[begin];
    size_t end = begin + 1;
    if (c == '{' || c == '[') {
      if (levels.size() > kMaxNestDepth) return {};
      levels.push_back({place(), c == '[' ? 0 : -1, ""});
    } else if (c == '}' || c == ']') {
      if (levels.size() > 1) levels.pop_back();
    } else if (c == ',') {
      if (levels.back().index >= 0) ++levels.back().index;
    } else {
      if (c == '"') {
        while (end < json.size() && json[end] != '"') end += json[end] == '\\' ? 2 : 1;
        end = std::min(end + 1, json.size());
      } else {
        end = std::min(json.find_first_of(" \n:,{}[]", begin), json.size());
      }
      const std::string text = json.substr(begin, end - begin);
      if (end < json.size() && json[end] == ':') {
        levels.back().key = text.substr(1, text.size() - 2);
      } else {
        values[place()] = text;
      }
    }
    begin = end;
  }
  return values;
}

}  // namespace

std::string describe_difference(const std::string& spaces, const std::string& expected) {
  const auto values = values_of(spaces);
  const auto expected_values = values_of(expected);
  std::vector<std::string> differences;
  for (const auto& [place, value] : values) {
    const auto found = expected_values.find(place);
    if (found == expected_values.end()) {
      differences.push_back(shorten(place) + " is not expected");
    } else if (value != found->second) {
      differences.push_back(shorten(place) + " is " + shorten(value) + ", expected " +
                            shorten(found->second));
    }
  }
  for (const auto& [place, value] : expected_values) {
    if (values.count(place) == 0) differences.push_back(shorten(place) + " is missing");
  }
  if (values.empty() || expected_values.empty() || differences.empty()) {
    return "they are " + shorten(spaces) + ", expected " + shorten(expected);
  }
  if (differences.size() > kMaxDifferences) differences.resize(kMaxDifferences);
  std::string text;
  for (const std::string& difference : differences) text += (text.empty() ? "" : "; ") + difference;
  return text;
}

void check_first_row(const std::string& peer, const rpcenv::Step& first, Rollout::Ranges ranges) {
  try {
    Rollout(1, true, first, std::make_shared<MemoryPool>(), std::nullopt, std::move(ranges));
  } catch (const WireError& error) {
    throw RefusedError("refused: " + peer + " sent an invalid first row: " + error.what());
  }
}

void Agreement::check_handshake(const std::string& peer, const rpcenv::Handshake& handshake) {
  const std::string who = "refused: " + peer;
  Lock lock(mutex_);
  const std::string& env = handshake.env();
  if (!env.empty() && !terms_.env.empty() && env != terms_.env) {
    throw RefusedError(who + " plays " + shorten(env) + ", expected " + shorten(terms_.env));
  }
  if (terms_.spaces.value_or(handshake.spaces()) != handshake.spaces()) {
    throw RefusedError(
        who + " has other spaces: " + describe_difference(handshake.spaces(), *terms_.spaces));
  }
  if (terms_.num_envs.value_or(handshake.num_envs()) != handshake.num_envs()) {
    throw RefusedError(who + " has " + std::to_string(handshake.num_envs()) +
                       " environments a stream, expected " + std::to_string(*terms_.num_envs));
  }
  if (!env.empty()) terms_.env = env;
  terms_.spaces = handshake.spaces();
  terms_.num_envs = handshake.num_envs();
}

void Agreement::check_row(const std::string& peer, const Nest<Array>& env_outputs) {
  const Nest<std::string> row =
      env_outputs.map([](const Array& array) { return array.description(); });
  Lock lock(mutex_);
  if (row_ && !(row.same_structure(*row_) && row.flatten() == row_->flatten())) {
    throw RefusedError("refused: " + peer + " sends rows of " + text_of(row) +
                       ", but other servers send " + text_of(*row_));
  }
  row_ = row;
}

}  // namespace torchbeast
