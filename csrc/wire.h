// SPDX-License-Identifier: Apache-2.0
// Between messages (rpcenv.proto) and arrays. Nothing that arrives is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "array.h"
#include "errors.h"
#include "nest.h"
#include "rpcenv.pb.h"

namespace torchbeast {

constexpr uint32_t kProtocolVersion = 1;
constexpr int kMaxMessageBytes = 256 << 20;
constexpr int kMaxNestDepth = 32;
constexpr int kMaxNestItems =
    1000;  // in all, since an empty one is 2 bytes in a message, but 56 here

// The arrays of a message, on its memory: for as long as it lives unchanged.
//
// Throws WireError where the length of the data is not that of dtype and shape, for a negative
// size, an unknown dtype, a bool that is neither 0 nor 1, and a float that is not finite as
// float32.
ArrayView decode(const rpcenv::Array& message);
Nest<ArrayView> decode(
    const rpcenv::Nest& message);  // also for nests that are too deep or too large

void encode(const ArrayView& array, rpcenv::Array* message);
void encode(const Nest<ArrayView>& nest, rpcenv::Nest* message);

// A row by its keys, each an array [N, ...] as decode() returns them: the observation as `frame`,
// and the fixed keys, of which last_action alone may be of any dtype and dimensions. With frames
// stacked on the other side, `frame` holds the newest alone.
//
// Throws WireError also where an array has not N entries, where N is not positive, and for a
// negative number of steps.
Nest<ArrayView>::Dict decode_row(const rpcenv::Step& step, int64_t num_envs);

// Shape of whole stacks [N, K * C, ...], from the first message of a stream.
Shape stacked_shape(const rpcenv::Step& step, int64_t num_envs, int64_t stack_size);

// Write the stacks of `step` to `target`, [1, N, K * C, ...]; `previous`, alike, has those of the
// row before, and is null for the first row. Throws WireError where shapes do not fit.
void restack(const rpcenv::Step& step, const ArrayView& newest, int64_t stack_size,
             const Array* previous, const Array& target);

}  // namespace torchbeast
