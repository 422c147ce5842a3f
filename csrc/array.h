// SPDX-License-Identifier: Apache-2.0
// Arrays in main memory, and the pool that their memory comes from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mutex.h"

namespace torchbeast {

enum class DType : uint8_t {
  kBool,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBFloat16,  // never on the wire: NumPy has none
};

size_t size_of(DType dtype);
const char* name_of(DType dtype);

using Shape = std::vector<int64_t>;

// Recycles blocks of memory: rollouts and batches are large and frequent, and memory from the
// system costs page faults each time. A block returns to the pool when the last pointer to it is
// gone, and may outlive all other pointers to the pool. Thread-safe.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  using Block = std::shared_ptr<std::byte>;
  using Allocator = std::function<Block(size_t)>;

  // `allocate`, by default from the heap, may be called by any thread.
  explicit MemoryPool(Allocator allocate = nullptr);

  // Uninitialized, aligned to 64 bytes where the allocator is the default one.
  Block take(size_t num_bytes);

 private:
  void put_back(size_t size, Block block);

  const Allocator allocate_;
  Mutex mutex_;
  std::map<size_t, std::vector<Block>> free_ TB_GUARDED_BY(mutex_);  // by size
};

// A read-only array in C order, in memory that it does not own.
struct ArrayView {
  DType dtype = DType::kUInt8;
  Shape shape;
  const std::byte* data = nullptr;

  size_t num_bytes() const;
  std::string description() const;  // such as float32[3, 4]

  bool is_integer() const;  // true for bool, too
  // Element `index` in C order; only for integers and bools.
  int64_t integer_at(size_t index) const;
};

// An array in C order. Copies share its memory.
struct Array {
  DType dtype = DType::kUInt8;
  Shape shape;
  MemoryPool::Block data;  // points to the first element

  size_t num_bytes() const;
  std::string description() const { return view().description(); }
  ArrayView view() const { return {dtype, shape, data.get()}; }

  // A view of entry `index` of the first dimension, which stays: [T, N] becomes [1, N].
  Array row(int64_t index) const;
};

Array make_array(DType dtype, Shape shape, MemoryPool& pool);

// Columns `begin` to `end` (excluded) of `array` along the batch dimension.
struct Columns {
  Array array;
  int64_t begin;
  int64_t end;
};

// Join columns along `batch_dim` in new memory.
//
// Throws std::invalid_argument where the arrays differ in dtype or in any other dimension.
Array concatenate(const std::vector<Columns>& parts, size_t batch_dim, MemoryPool& pool);

// Copy elements that lie `strides` (in elements, possibly 0 or negative) apart into C order.
Array copy_strided(DType dtype, const Shape& shape, const std::vector<int64_t>& strides,
                   const std::byte* data, MemoryPool& pool);

}  // namespace torchbeast
