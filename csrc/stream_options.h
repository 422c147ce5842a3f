// SPDX-License-Identifier: Apache-2.0
// Options of a stream, which it sends to its server as gRPC metadata (rpcenv.proto).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torchbeast {

struct StreamOptions {
  std::optional<int64_t> num_envs;  // unset: the server's choice
  std::string seed;                 // integers separated by commas; empty: the server's choice
  bool newest_frame_only = false;
  bool truncated_rows = false;
};

}  // namespace torchbeast
