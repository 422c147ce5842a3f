// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

namespace torchbeast {

namespace {

constexpr size_t kAlignment = 64;
// Free blocks of one size; more go back to the system.
constexpr size_t kMaxFree = 64;

MemoryPool::Block allocate_aligned(size_t num_bytes) {
  void* memory = ::operator new(num_bytes, std::align_val_t(kAlignment));
  return MemoryPool::Block(static_cast<std::byte*>(memory), [](std::byte* pointer) {
    ::operator delete(pointer, std::align_val_t(kAlignment));
  });
}

// Batches vary in size: with four sizes to each power of two, a block fits similar ones.
size_t round_up(size_t num_bytes) {
  size_t size = kAlignment;
  while (size < num_bytes) size *= 2;
  const size_t step = std::max(kAlignment, size / 8);
  return std::max(kAlignment, (num_bytes + step - 1) / step * step);
}

size_t count_elements(const Shape& shape) {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

}  // namespace

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt32:
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kUInt64:
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  throw std::logic_error("unknown dtype");
}

const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {"bool",    "uint8",   "uint16",  "uint32", "uint64",
                                           "int8",    "int16",   "int32",   "int64",  "float16",
                                           "float32", "float64", "bfloat16"};
  return kNames[static_cast<size_t>(dtype)];
}

MemoryPool::MemoryPool(Allocator allocate)
    : allocate_(allocate ? std::move(allocate) : allocate_aligned) {}

MemoryPool::Block MemoryPool::take(size_t num_bytes) {
  const size_t size = round_up(num_bytes);
  Block block;
  {
    Lock lock(mutex_);
    std::vector<Block>& blocks = free_[size];
    if (!blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
    }
  }
  if (!block) block = allocate_(size);
  std::byte* pointer = block.get();
  // The deleter returns the block to the pool, and keeps the pool alive until then.
  return Block(pointer, [pool = shared_from_this(), size, block = std::move(block)](
                            std::byte*) mutable { pool->put_back(size, std::move(block)); });
}

void MemoryPool::put_back(size_t size, Block block) {
  Lock lock(mutex_);
  std::vector<Block>& blocks = free_[size];
  if (blocks.size() < kMaxFree) blocks.push_back(std::move(block));
  // Otherwise `block`, a parameter, is freed after the lock is released.
}

size_t ArrayView::num_bytes() const { return count_elements(shape) * size_of(dtype); }

std::string ArrayView::description() const {
  std::string text = std::string(name_of(dtype)) + "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

bool ArrayView::is_integer() const { return dtype <= DType::kInt64; }

int64_t ArrayView::integer_at(size_t index) const {
  const auto read = [&](auto value) {
    std::memcpy(&value, data + index * sizeof(value), sizeof(value));  // may be unaligned
    return static_cast<int64_t>(value);
  };
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
      return read(uint8_t{});
    case DType::kUInt16:
      return read(uint16_t{});
    case DType::kUInt32:
      return read(uint32_t{});
    case DType::kUInt64:
      return read(uint64_t{});
    case DType::kInt8:
      return read(int8_t{});
    case DType::kInt16:
      return read(int16_t{});
    case DType::kInt32:
      return read(int32_t{});
    case DType::kInt64:
      return read(int64_t{});
    default:
      throw std::logic_error("not an integer dtype");
  }
}

size_t Array::num_bytes() const { return count_elements(shape) * size_of(dtype); }

Array Array::row(int64_t index) const {
  Array row{dtype, shape, nullptr};
  row.shape[0] = 1;
  row.data = MemoryPool::Block(data, data.get() + static_cast<size_t>(index) * row.num_bytes());
  return row;
}

Array make_array(DType dtype, Shape shape, MemoryPool& pool) {
  size_t num_bytes = size_of(dtype);
  for (const int64_t size : shape) {
    if (__builtin_mul_overflow(num_bytes, static_cast<size_t>(size), &num_bytes) ||
        num_bytes > static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
      throw std::bad_alloc();
    }
  }
  return Array{dtype, std::move(shape), pool.take(num_bytes)};
}

Array concatenate(const std::vector<Columns>& parts, size_t batch_dim, MemoryPool& pool) {
  const Array& first = parts.at(0).array;
  Shape shape = first.shape;
  shape.at(batch_dim) = 0;
  for (const Columns& part : parts) {
    Shape rest = part.array.shape;
    rest.at(batch_dim) = first.shape[batch_dim];
    if (part.array.dtype != first.dtype || rest != first.shape) {
      throw std::invalid_argument("cannot join " + first.description() + " and " +
                                  part.array.description() + " along dimension " +
                                  std::to_string(batch_dim));
    }
    shape[batch_dim] += part.end - part.begin;
  }
  Array result = make_array(first.dtype, shape, pool);

  size_t outer = 1;
  size_t column = size_of(first.dtype);  // bytes
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i < batch_dim) outer *= static_cast<size_t>(shape[i]);
    if (i > batch_dim) column *= static_cast<size_t>(shape[i]);
  }
  std::byte* target = result.data.get();
  for (size_t i = 0; i < outer; ++i) {
    for (const Columns& part : parts) {
      const size_t stride = static_cast<size_t>(part.array.shape[batch_dim]) * column;
      const size_t length = static_cast<size_t>(part.end - part.begin) * column;
      const size_t offset = i * stride + static_cast<size_t>(part.begin) * column;
      if (length > 0) std::memcpy(target, part.array.data.get() + offset, length);
      target += length;
    }
  }
  return result;
}

Array copy_strided(DType dtype, const Shape& shape, const std::vector<int64_t>& strides,
                   const std::byte* data, MemoryPool& pool) {
  Array result = make_array(dtype, shape, pool);
  const size_t item = size_of(dtype);
  const size_t count = count_elements(shape);
  std::vector<int64_t> index(shape.size(), 0);
  for (size_t i = 0; i < count; ++i) {
    int64_t offset = 0;
    for (size_t d = 0; d < shape.size(); ++d) offset += index[d] * strides[d];
    std::memcpy(result.data.get() + i * item, data + offset * static_cast<int64_t>(item), item);
    for (size_t d = shape.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  return result;
}

}  // namespace torchbeast
