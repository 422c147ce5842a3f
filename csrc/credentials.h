// SPDX-License-Identifier: Apache-2.0
// The TLS certificates and the token that the learner uses with its environment servers.
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
  std::optional<Tls> tls;  // unset: no encryption
  std::optional<std::string> auth_token;

  // Throws std::invalid_argument for empty texts and for tokens that gRPC would not send.
  void check() const;
};

}  // namespace torchbeast
