// SPDX-License-Identifier: Apache-2.0
// The certificates that the learner trusts, and what it proves itself to servers with.
#pragma once

#include <optional>
#include <string>

namespace torchbeast {

struct Credentials {
  struct Tls {  // PEM texts, not paths
    std::string ca;
    std::string certificate;
    std::string key;
  };
  std::optional<Tls> tls;  // else nothing is encrypted
  std::optional<std::string> auth_token;

  // Throws std::invalid_argument for what gRPC would not send.
  void check() const;
};

}  // namespace torchbeast
