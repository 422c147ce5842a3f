// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <google/protobuf/message.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "array.h"
#include "rpcenv.pb.h"
#include "wire.h"

namespace torchbeast {

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

bool one_in(uint64_t n, Random& random) { return random() % n == 0; }

std::string random_bytes(size_t size, Random& random) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Numbers of `item` bytes, the last one masked: 0xbf makes finite floats, 0x7f counts, 1 bools.
std::string random_numbers(size_t size, size_t item, int mask, Random& random) {
  std::string bytes = random_bytes(size, random);
  for (size_t i = item - 1; i < size; i += item) bytes[i] = static_cast<char>(bytes[i] & mask);
  return bytes;
}

// Random data of the dtype and the shape of `array`.
void fill(rpcenv::Array* array, Random& random) {
  const auto dtype = static_cast<DType>(array->dtype());
  const Shape shape(array->shape().begin(), array->shape().end());
  const size_t size = Array{dtype, shape, nullptr}.num_bytes();
  array->set_data(dtype == DType::kBool      ? random_numbers(size, 1, 1, random)
                  : dtype >= DType::kFloat16 ? random_numbers(size, size_of(dtype), 0xbf, random)
                                             : random_bytes(size, random));
}

void fill(rpcenv::Nest* nest, Random& random) {
  if (nest->has_array()) fill(nest->mutable_array(), random);
  for (rpcenv::Nest& item : *nest->mutable_items()) fill(&item, random);
}

void choose_array(int64_t num_envs, Random& random, rpcenv::Array* array) {
  array->set_dtype(static_cast<rpcenv::DType>(random() % rpcenv::DType_ARRAYSIZE));
  array->add_shape(num_envs);
  while (one_in(2, random)) array->add_shape(one_in(8, random) ? 0 : 1 + random() % 3);
}

void choose_nest(int64_t num_envs, int depth, Random& random, rpcenv::Nest* nest) {
  if (depth == 0 || one_in(2, random)) return choose_array(num_envs, random, nest->mutable_array());
  const bool is_dict = one_in(2, random);
  for (char key = 'a'; key < 'd' && !one_in(4, random); ++key) {
    choose_nest(num_envs, depth - 1, random, nest->add_items());
    if (is_dict) nest->add_keys(std::string(1, key));
  }
}

void fill_fields(int64_t num_envs, Random& random, rpcenv::Step* step) {
  const auto n = static_cast<size_t>(num_envs);
  step->set_reward(random_numbers(4 * n, 4, 0xbf, random));
  step->set_done(random_numbers(n, 1, 1, random));
  step->set_truncated(random_numbers(n, 1, 1, random));
  step->set_terminated(random_numbers(n, 1, 1, random));
  step->set_episode_return(random_numbers(4 * n, 4, 0xbf, random));
  step->set_episode_step(random_numbers(4 * n, 4, 0x7f, random));
  step->set_game_done(random_numbers(n, 1, 1, random));
  step->set_game_return(random_numbers(4 * n, 4, 0xbf, random));
  step->set_game_step(random_numbers(4 * n, 4, 0x7f, random));
  step->set_last_action(step->has_handshake() ? std::string(8 * n, '\0')
                                              : random_bytes(8 * n, random));
}

int64_t odd_number(Random& random) {
  static constexpr int64_t kSmall[] = {0, 1, 2, 3, 4, 5, -1, 12, 31, 33, 255, 256};
  if (one_in(2, random)) return kSmall[random() % std::size(kSmall)];
  const uint64_t power = uint64_t{1} << random() % 64;  // limits are near one
  return static_cast<int64_t>(power + random() % 3 - 1);
}

std::string spoiled(std::string text, Random& random) {
  switch (random() % 7) {
    case 0:
      if (!text.empty()) text.pop_back();
      break;
    case 1:
      text.push_back(static_cast<char>(random()));
      break;
    case 2:
      text += text;
      break;
    case 3:
      text.append(random() % (one_in(64, random) ? 10'000 : 10), 'x');
      break;
    case 4:
      if (!text.empty()) text[random() % text.size()] = static_cast<char>(random() % 2);
      break;
    case 5:  // a NaN, if the bytes are a float
      std::fill_n(text.rbegin(), std::min<size_t>(text.size(), 4), '\xff');
      break;
    default:
      if (!text.empty()) text[random() % text.size()] = static_cast<char>(random());
  }
  return text;
}

// `message` and all messages in it.
void list_messages(Message* message, std::vector<Message*>* all) {
  all->push_back(message);
  const Reflection* reflection = message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (!field->is_repeated()) {
      list_messages(reflection->MutableMessage(message, field), all);
      continue;
    }
    for (int i = 0; i < reflection->FieldSize(*message, field); ++i) {
      list_messages(reflection->MutableRepeatedMessage(message, field, i), all);
    }
  }
}

// Set the field, or add to it where it is repeated: a changed copy of its value, or another value.
// `donor` is a message to copy, if its type is that of the field.
void put(Message* message, const FieldDescriptor* field, const Message& donor, Random& random) {
  const Reflection* reflection = message->GetReflection();
  const bool add = field->is_repeated();
  const int size = add ? reflection->FieldSize(*message, field) : 0;
  const int index = size > 0 ? static_cast<int>(random() % static_cast<uint64_t>(size)) : -1;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64: {  // repeated, as in Array.shape
      int64_t number = odd_number(random);
      if (index >= 0 && one_in(4, random)) {
        number = reflection->GetRepeatedInt64(*message, field, index);
      }
      reflection->AddInt64(message, field, number);
      break;
    }
    case FieldDescriptor::CPPTYPE_UINT32:
      reflection->SetUInt32(message, field, static_cast<uint32_t>(odd_number(random)));
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      reflection->SetEnumValue(message, field, static_cast<int>(random() % 14) - 1);
      break;
    case FieldDescriptor::CPPTYPE_STRING: {
      std::string text;
      if (!add) text = reflection->GetString(*message, field);
      if (index >= 0) text = reflection->GetRepeatedString(*message, field, index);
      if (!add || one_in(2, random)) text = spoiled(std::move(text), random);
      add ? reflection->AddString(message, field, std::move(text))
          : reflection->SetString(message, field, std::move(text));
      break;
    }
    default: {
      Message* target =
          add ? reflection->AddMessage(message, field) : reflection->MutableMessage(message, field);
      if (target->GetDescriptor() == donor.GetDescriptor()) target->CopyFrom(donor);
    }
  }
}

void spoil_field(Message* message, const Message& donor, Random& random) {
  const Reflection* reflection = message->GetReflection();
  const auto* type = message->GetDescriptor();
  const FieldDescriptor* field = type->field(static_cast<int>(random() % type->field_count()));
  if (one_in(16, random)) return reflection->ClearField(message, field);
  if (!field->is_repeated()) return put(message, field, donor, random);
  const int size = reflection->FieldSize(*message, field);
  const int index = static_cast<int>(random() % static_cast<uint64_t>(size + 1));
  switch (random() % 4) {
    case 0:
      if (size > 0) reflection->RemoveLast(message, field);
      break;
    case 1:
      if (index < size) reflection->SwapElements(message, field, index, size - 1);
      break;
    case 2:  // one more, or many
      for (uint64_t i = one_in(64, random) ? random() % 5'000 : 1; i > 0; --i) {
        put(message, field, donor, random);
      }
      break;
    default:  // another one in its place
      put(message, field, donor, random);
      reflection->SwapElements(message, field, index, size);
      if (index < size) reflection->RemoveLast(message, field);
  }
}

// Put a nest into nests.
void bury(rpcenv::Nest* nest, uint64_t depth) {
  for (; depth > 0; --depth) {
    rpcenv::Nest outer;
    outer.add_items()->Swap(nest);
    nest->Swap(&outer);
  }
}

void spoil_bytes(std::string* message, Random& random) {
  const size_t size = message->size();
  message->resize(size + random() % 16);
  auto* data = reinterpret_cast<uint8_t*>(message->data());
  message->resize(LLVMFuzzerMutate(data, size, message->size()));
}

void spoil_message(std::string* message, Random& random) {
  rpcenv::Step step;
  if (one_in(8, random) || !step.ParseFromString(*message)) return spoil_bytes(message, random);
  if (one_in(32, random)) {
    bury(step.mutable_observation(), random() % (one_in(4, random) ? 128 : 4));
  } else {
    std::vector<Message*> all;
    list_messages(&step, &all);
    const Message* chosen = all[random() % all.size()];
    const std::unique_ptr<Message> donor(chosen->New());
    donor->CopyFrom(*chosen);
    spoil_field(all[random() % all.size()], *donor, random);
  }
  *message = step.SerializePartialAsString();
}

}  // namespace

Stream unpack(const uint8_t* data, size_t size) {
  Stream stream;
  if (size == 0) return stream;
  stream.unroll_length = 1 + data[0] % 4;
  stream.dict_outputs = (data[0] & 4) == 0;
  for (size_t at = 1; size - at >= sizeof(uint32_t);) {
    uint32_t length;
    std::memcpy(&length, data + at, sizeof(length));
    at += sizeof(length);
    const size_t end = at + std::min<size_t>(length, size - at);
    stream.messages.emplace_back(data + at, data + end);
    at = end;
  }
  return stream;
}

std::string pack(const Stream& stream) {
  std::string packed(1,
                     static_cast<char>(stream.unroll_length - 1 + (stream.dict_outputs ? 0 : 4)));
  for (const std::string& message : stream.messages) {
    const auto length = static_cast<uint32_t>(message.size());
    packed.append(reinterpret_cast<const char*>(&length), sizeof(length));
    packed += message;
  }
  return packed;
}

Stream good_stream(Random& random, int64_t num_envs) {
  Stream stream{1 + static_cast<int64_t>(random() % 4), !one_in(4, random), {}};
  const int64_t stack_size = one_in(2, random) ? static_cast<int64_t>(random() % 4) : 0;
  rpcenv::Step step;
  rpcenv::Nest* observation = step.mutable_observation();
  if (stack_size > 0) {  // one array [N, C, ...]
    choose_array(num_envs, random, observation->mutable_array());
    observation->mutable_array()->add_shape(1 + static_cast<int64_t>(random() % 3));
  }
  while (stack_size == 0) {
    choose_nest(num_envs, 3, random, observation);
    fill(observation, random);
    if (!decode(*observation).empty()) break;
    observation->Clear();
  }
  if (stack_size == 0 && one_in(4, random)) {
    choose_array(num_envs, random, step.mutable_last_action_array());
  }
  for (uint64_t num_rows = 1 + random() % 6; num_rows > 0; --num_rows) {
    const bool is_first = stream.messages.empty();
    step.clear_handshake();
    if (is_first) {
      step.mutable_handshake()->set_protocol_version(kProtocolVersion);
      step.mutable_handshake()->set_num_envs(static_cast<uint32_t>(num_envs));
      step.mutable_handshake()->set_stack_size(static_cast<uint32_t>(stack_size));
      step.mutable_handshake()->set_spaces(kSpaces);
      step.mutable_handshake()->set_env(kEnv);
    }
    fill(observation, random);
    fill_fields(num_envs, random, &step);
    if (step.has_last_action_array()) {
      rpcenv::Array* last_action = step.mutable_last_action_array();
      fill(last_action, random);
      if (is_first) last_action->set_data(std::string(last_action->data().size(), '\0'));
      step.clear_last_action();
    }
    if (stack_size > 0) {
      step.set_is_full(is_first ? std::string(num_envs, '\1')
                                : random_numbers(num_envs, 1, 1, random));
      *step.mutable_full() = observation->array();
      step.mutable_full()->set_shape(
          0, std::count(step.is_full().begin(), step.is_full().end(), '\1'));
      step.mutable_full()->set_shape(1, stack_size * observation->array().shape(1));
      fill(step.mutable_full(), random);
    }
    stream.messages.push_back(step.SerializeAsString());
  }
  return stream;
}

void spoil(Stream* stream, Random& random) {
  std::vector<std::string>& messages = stream->messages;
  if (messages.empty()) *stream = good_stream(random, 1);
  std::string& message = messages[random() % messages.size()];
  switch (random() % 32) {
    case 0: {  // a message of another stream, perhaps without environments
      const Stream other = good_stream(random, static_cast<int64_t>(random() % 4));
      message = other.messages[random() % other.messages.size()];
      break;
    }
    case 1:
      message.swap(messages[random() % messages.size()]);
      break;
    case 2:
      messages.push_back(message);
      break;
    default:
      spoil_message(&message, random);
  }
}

}  // namespace torchbeast
