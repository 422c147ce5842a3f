// SPDX-License-Identifier: Apache-2.0
#include "credentials.h"

#include <algorithm>
#include <stdexcept>

namespace torchbeast {

void Credentials::check() const {
  if (tls && (tls->ca.empty() || tls->certificate.empty() || tls->key.empty())) {
    throw std::invalid_argument(
        "tls should be three PEM texts: the authority's certificate, the certificate, its key");
  }
  const auto printable = [](char c) { return '!' <= c && c <= '~'; };
  if (auth_token &&
      (auth_token->empty() || !std::all_of(auth_token->begin(), auth_token->end(), printable))) {
    throw std::invalid_argument("auth_token should be printable ASCII without spaces");
  }
}

}  // namespace torchbeast
