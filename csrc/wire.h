// SPDX-License-Identifier: Apache-2.0
// Converts between messages (rpcenv.proto) and arrays. No received message is trusted.
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
// Items of a whole nest: an empty one takes 2 bytes of a message, but 56 of memory.
constexpr int kMaxNestItems = 1000;

// The arrays of a message, in its memory: valid until the message changes or ends.
//
// Throws WireError for data whose length is not that of dtype and shape, a negative size, an
// unknown dtype, a bool that is neither 0 nor 1, a float that is not finite as float32, and a nest
// that is too deep or too large.
ArrayView decode(const rpcenv::Array& message);
Nest<ArrayView> decode(const rpcenv::Nest& message);

void encode(const ArrayView& array, rpcenv::Array* message);
void encode(const Nest<ArrayView>& nest, rpcenv::Nest* message);

// A row by its keys, with arrays [N, ...] as from decode(): the observation as `frame`, and the
// fixed keys, of which only last_action may have any dtype and dimensions. If the server sends only
// the newest of stacked frames, `frame` is that one.
//
// Throws WireError also for an array without N entries, for N below 1, and for a negative number of
// steps.
Nest<ArrayView>::Dict decode_row(const rpcenv::Step& step, int64_t num_envs);

// Shape of whole stacks [N, K * C, ...], from the first message of a stream.
Shape stacked_shape(const rpcenv::Step& step, int64_t num_envs, int64_t stack_size);

// Write the stacks of `step` to `target`, [1, N, K * C, ...]; `previous` has those of the row
// before, in the same shape, and is null for the first row. Throws WireError where shapes do not
// match.
void restack(const rpcenv::Step& step, const ArrayView& newest, int64_t stack_size,
             const Array* previous, const Array& target);

}  // namespace torchbeast
