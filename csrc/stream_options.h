// SPDX-License-Identifier: Apache-2.0
// What a stream asks of its server, as gRPC metadata (rpcenv.proto).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace torchbeast {

struct StreamOptions {
  std::optional<int64_t> num_envs;  // else as many as the server likes
  std::string seed;                 // ints separated by commas; else of the server's choice
  bool newest_frame_only = false;
  bool truncated_rows = false;
};

}  // namespace torchbeast
