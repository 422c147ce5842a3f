// SPDX-License-Identifier: Apache-2.0
// The module libtorchbeast._C: bindings only.
//
// A function that can wait releases the GIL first, and holds no Python object by value meanwhile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "agreement.h"
#include "batching_queue.h"
#include "dynamic_batcher.h"
#include "errors.h"
#include "listener.h"
#include "no_gil.h"
#include "outgoing_stream.h"
#include "python_arrays.h"
#include "stream_options.h"

#if __has_include(<google/protobuf/stubs/logging.h>)
#include <google/protobuf/stubs/logging.h>
#define LOGS_CAN_BE_SILENCED
#endif

namespace py = pybind11;

namespace torchbeast {
namespace {

std::shared_ptr<MemoryPool> make_pool(bool pin_memory) {
  return pin_memory ? make_pinned_pool() : std::make_shared<MemoryPool>();
}

template <class Function>
auto without_gil(Function&& function) {
  NoGil no_gil;
  return function();
}

// What `wait` returns, called without the GIL; StopIteration for an empty optional or pointer.
template <class Wait>
auto next_item(Wait&& wait) {
  auto item = without_gil(wait);
  if (!item) throw py::stop_iteration();
  return item;
}

std::shared_ptr<BatchingQueue> make_queue(int64_t batch_dim, int64_t minimum_batch_size,
                                          int64_t maximum_batch_size,
                                          std::optional<int64_t> timeout_ms, bool,
                                          std::optional<int64_t> maximum_queue_size,
                                          bool pin_memory) {
  return std::make_shared<BatchingQueue>(
      BatchingQueue::Options{batch_dim, minimum_batch_size, maximum_batch_size, timeout_ms,
                             maximum_queue_size},
      make_pool(pin_memory), !pin_memory);
}

void enqueue(BatchingQueue& queue, py::handle nest) {
  Nest<Array> arrays = from_python(nest);
  NoGil no_gil;
  queue.enqueue(std::move(arrays));
}

py::object dequeue(BatchingQueue& queue) {
  return to_python(*next_item([&] { return queue.dequeue(); }));
}

std::shared_ptr<DynamicBatcher> make_batcher(int64_t batch_dim, int64_t minimum_batch_size,
                                             int64_t maximum_batch_size,
                                             std::optional<int64_t> timeout_ms, bool,
                                             bool pin_memory) {
  return std::make_shared<DynamicBatcher>(
      DynamicBatcher::Options{batch_dim, minimum_batch_size, maximum_batch_size, timeout_ms},
      make_pool(false), make_pool(pin_memory));
}

py::object compute(DynamicBatcher& batcher, py::handle inputs) {
  Nest<Array> arrays = from_python(inputs);
  return to_python(without_gil([&] { return batcher.compute(std::move(arrays)); }));
}

std::unique_ptr<Batch> next_batch(DynamicBatcher& batcher) {
  return next_item([&] { return batcher.next(); });
}

void set_outputs(Batch& batch, py::handle outputs) {
  const Nest<Array> arrays = from_python(outputs);
  NoGil no_gil;
  batch.set_outputs(arrays);
}

using Tls = std::optional<std::tuple<std::string, std::string, std::string>>;

Credentials make_credentials(const Tls& tls, std::optional<std::string> auth_token) {
  Credentials credentials{std::nullopt, std::move(auth_token)};
  if (tls) {
    const auto& [ca, certificate, key] = *tls;
    credentials.tls = Credentials::Tls{ca, certificate, key};
  }
  return credentials;
}

Rollout::Ranges read_ranges(py::handle nest) {
  Nest<Array> ranges = from_python(nest);
  if (!ranges.is_dict()) throw py::value_error("ranges should be a dict");
  ranges.for_each([](const Array& array) {
    if (array.shape.empty() ||
        (array.shape[0] != 0 && (array.shape[0] != 2 || !array.view().is_integer()))) {
      throw py::value_error("ranges has " + array.description() +
                            "; it should have integers [2, ...], or [0, ...]");
    }
  });
  return std::move(ranges.dict());
}

std::pair<ActorPool::Options, std::shared_ptr<Listener>> read_options(const py::dict& keywords) {
  size_t num_known = 0;
  const auto read = [&](const char* name, auto* value) {
    if (!keywords.contains(name)) return;
    ++num_known;
    const py::handle given = keywords[name];
    if (given.is_none()) return;
    try {
      *value = given.cast<std::decay_t<decltype(*value)>>();
    } catch (const py::cast_error&) {
      throw py::type_error(py::str("{} cannot be {!r}").format(name, given));
    }
  };
  ActorPool::Options options;
  py::dict ranges;
  Tls tls;
  std::optional<std::string> auth_token;
  std::shared_ptr<Listener> listener;
  read("dict_outputs", &options.dict_outputs);
  read("num_envs", &options.num_envs);
  read("expected_num_envs", &options.expected_num_envs);
  read("seeds", &options.seeds);
  read("newest_frame_only", &options.newest_frame_only);
  read("reconnect", &options.reconnect);
  read("spaces", &options.spaces);
  read("env", &options.env);
  read("ranges", &ranges);
  read("connect_timeout_s", &options.connect_timeout_s);
  read("step_timeout_s", &options.step_timeout_s);
  read("tls", &tls);
  read("auth_token", &auth_token);
  read("listener", &listener);
  read("listener_seed", &options.listener_seed);
  if (num_known < keywords.size()) {
    throw py::type_error(py::str("unknown keyword among {}").format(py::list(keywords)));
  }
  options.credentials = make_credentials(tls, std::move(auth_token));
  options.ranges = read_ranges(ranges);
  return {std::move(options), std::move(listener)};
}

std::shared_ptr<ActorPool> make_actor_pool(int64_t unroll_length,
                                           std::shared_ptr<BatchingQueue> learner_queue,
                                           std::shared_ptr<DynamicBatcher> inference_batcher,
                                           std::vector<std::string> env_server_addresses,
                                           py::handle initial_agent_state,
                                           const py::kwargs& keywords) {
  auto [options, listener] = read_options(keywords);
  return std::make_shared<ActorPool>(unroll_length, std::move(learner_queue),
                                     std::move(inference_batcher), std::move(env_server_addresses),
                                     from_python(initial_agent_state), std::move(options),
                                     std::move(listener));
}

// A peer's text, which may be any bytes, made fit for a log.
py::object to_text(const std::string& bytes) {
  return py::module_::import("libtorchbeast.access").attr("printable")(py::bytes(bytes));
}

void set_text_error(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, to_text(error.what()).ptr());
}

template <class Source>
py::object next_event(Source& source) {
  return to_text(*next_item([&] { return source.events().next(); }));
}

py::list silences(ActorPool& pool) {
  const auto silences = without_gil([&] { return pool.silences(); });
  py::list result;
  for (const auto& [index, peer, what, seconds] : silences) {
    result.append(py::make_tuple(index, to_text(peer), what, seconds));
  }
  return result;
}

py::dict waits(ActorPool& pool) {
  const auto totals = without_gil([&] { return pool.wait_times().totals(); });
  py::dict result;
  for (size_t i = 0; i < totals.size(); ++i) result[WaitTimes::kNames[i]] = totals[i];
  return result;
}

// The handshake in the first message of a stream, whose row `check` may refuse.
py::dict read_handshake(const std::string& peer, const rpcenv::Step& first,
                        const py::object& check) {
  const rpcenv::Handshake& handshake = first.handshake();
  py::dict result;
  result["protocol_version"] = handshake.protocol_version();
  result["num_envs"] = handshake.num_envs();
  result["spaces"] = handshake.spaces();
  result["stack_size"] = handshake.stack_size();
  result["env"] = handshake.env();
  if (!check.is_none()) {
    Rollout::Ranges ranges = read_ranges(check(result));
    NoGil no_gil;
    check_first_row(peer, first, std::move(ranges));
  }
  return result;
}

py::dict query_server(const std::string& address, std::optional<int64_t> num_envs, double timeout_s,
                      std::optional<double> connect_timeout_s, const Tls& tls,
                      std::optional<std::string> auth_token, const py::object& check) {
  rpcenv::Step first;
  std::string peer;
  {
    NoGil no_gil;
    OutgoingStream stream(address, StreamOptions{num_envs, "", false, false},
                          make_credentials(tls, std::move(auth_token)));
    const std::chrono::duration<double> timeout(timeout_s),
        connect_timeout(connect_timeout_s.value_or(timeout_s));
    stream.limit(timeout);
    first = stream.open(connect_timeout, timeout);
    peer = stream.peer();
  }
  return read_handshake(peer, first, check);
}

std::shared_ptr<Listener> make_listener(int socket, int64_t max_streams, const Tls& tls,
                                        std::optional<std::string> auth_token) {
  Credentials credentials = make_credentials(tls, std::move(auth_token));
  NoGil no_gil;
  return std::make_shared<Listener>(socket, max_streams, std::move(credentials));
}

py::dict query_listener(Listener& listener, std::optional<int64_t> num_envs, double timeout_s,
                        const py::object& check) {
  py::dict handshake;
  const auto read = [&](const std::string& peer, const rpcenv::Step& first) {
    py::gil_scoped_acquire gil;
    try {
      handshake = read_handshake(peer, first, check);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_ConnectionRefusedError)) throw;
      throw RefusedError("refused: " + peer + " has " + std::string(py::str(error.value())));
    }
  };
  NoGil no_gil;
  listener.query(StreamOptions{num_envs, "", false, false},
                 std::chrono::duration<double>(timeout_s), read);
  return handshake;
}

// The methods that queues and batchers share.
template <class Queue, class... Options>
void add_queue_methods(py::class_<Queue, Options...>* queue, const char* size_doc) {
  queue
      ->def("close", &Queue::close, py::call_guard<NoGil>(),
            "Wake all waiting threads: iteration ends, other calls raise ClosedBatchingQueue. A "
            "second close() raises RuntimeError.")
      .def("is_closed", &Queue::is_closed, py::call_guard<NoGil>())
      .def("size", &Queue::size, py::call_guard<NoGil>(), size_doc)
      .def("__iter__", [](py::object self) { return self; });
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "PolyBeast's core: queues, dynamic batching, actors.";
#ifdef LOGS_CAN_BE_SILENCED
  // It prints a line for each text of a peer that is not UTF-8: strangers could fill a disk.
  google::protobuf::SetLogHandler(nullptr);
#endif

  py::register_exception<ClosedError>(m, "ClosedBatchingQueue", PyExc_RuntimeError);
  py::register_exception<AsyncError>(m, "AsyncError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const TimeoutError& e) {
      set_text_error(PyExc_TimeoutError, e);
    } catch (const RefusedError& e) {
      set_text_error(PyExc_ConnectionRefusedError, e);
    } catch (const EnvironmentError& e) {
      set_text_error(PyExc_ConnectionAbortedError, e);
    } catch (const ConnectionError& e) {
      set_text_error(PyExc_ConnectionError, e);
    }
  });

  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>> queue(
      m, "BatchingQueue",
      "A queue of nests of arrays; iterate over it for batches. Sizes count columns along "
      "batch_dim. check_inputs is accepted for compatibility: inputs are always checked.");
  queue
      .def(py::init(&make_queue), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::kw_only(), py::arg("pin_memory") = false)
      .def("enqueue", &enqueue, py::arg("nest"),
           "Add a nest of tensors [..., columns, ...]; blocks while the queue is full. Raises "
           "ValueError for an empty nest or too few dimensions, ClosedBatchingQueue when closed.")
      .def("__next__", &dequeue, "The next batch: a nest of tensors that belongs to the caller.");
  add_queue_methods(&queue, "Columns in the queue.");

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>> batcher(
      m, "DynamicBatcher",
      "Joins the calls of many threads into batches; iterate over it and set the outputs of each "
      "batch. Sizes count columns along batch_dim. check_outputs is accepted for compatibility: "
      "outputs are always checked.");
  batcher
      .def(py::init(&make_batcher), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::kw_only(), py::arg("pin_memory") = false)
      .def("compute", &compute, py::arg("inputs"),
           "Wait for the outputs that belong to these inputs. Raises AsyncError if the batch was "
           "dropped, ClosedBatchingQueue when closed.")
      .def("__next__", &next_batch);
  add_queue_methods(&batcher, "Columns that are in no batch yet.");

  py::class_<Batch>(m, "Batch", "The inputs of one or more calls of compute().")
      .def(
          "get_inputs", [](const Batch& batch) { return to_python(batch.inputs()); },
          "The calls' nests of tensors, joined along batch_dim.")
      .def("set_outputs", &set_outputs, py::arg("outputs"),
           "Return each call its part. Raises RuntimeError the second time, ValueError for too few "
           "dimensions or another batch size.");

  py::class_<Listener, std::shared_ptr<Listener>>(
      m, "Listener",
      "Accepts streams of environments that dial in, for an ActorPool.\n\n"
      "socket: descriptor of a listening socket, to be closed after close().\n"
      "max_streams: largest number of streams at the same time.\n"
      "tls: PEM texts: certificate of the authority that signed the environments' certificates, "
      "our certificate, our key.\nauth_token: streams without it are refused.")
      .def(py::init(&make_listener), py::arg("socket"), py::arg("max_streams"), py::kw_only(),
           py::arg("tls") = py::none(), py::arg("auth_token") = py::none())
      .def("query", &query_listener, py::arg("num_envs") = py::none(), py::arg("timeout_s") = 60.0,
           py::kw_only(), py::arg("check") = py::none(),
           "Wait for environments that can be used, and return their handshake as query_server "
           "does. check may raise ConnectionRefusedError: they are told, next_event() says so, and "
           "others are asked. Raises ClosedBatchingQueue after close().")
      .def("num_streams", &Listener::num_streams, py::call_guard<NoGil>(),
           "Streams that are there.")
      .def("next_event", &next_event<Listener>,
           "Wait for the next log line about strangers. Raises StopIteration after close().")
      .def("close", &Listener::close, py::call_guard<NoGil>(),
           "End all streams, and refuse new ones.");

  py::class_<ActorPool, std::shared_ptr<ActorPool>>(
      m, "ActorPool",
      "Actors: one thread and one stream for each entry of env_server_addresses.\n\n"
      "The batcher gets ((frame, reward, done, episode_step, episode_return), agent_state), all "
      "[1, N, ...], and must return ((action, ...), agent_state). The queue gets ((env outputs, "
      "agent outputs), initial_agent_state), the outputs [T + 1, N, ...].\n\n"
      "Keywords; None means the default:\n"
      "dict_outputs=False: env outputs are a dict of all keys of a row, see "
      "libtorchbeast/rows.py; agent outputs are a dict with an action.\n"
      "num_envs: N to ask the servers for.\nexpected_num_envs: N required of all servers.\n"
      "seeds: one for each stream, each a string of integers separated by commas.\n"
      "newest_frame_only=False: servers send only the newest of stacked frames.\n"
      "reconnect=False: a lost server ends only its rollout.\n"
      "spaces: JSON required of all servers; default: the first server's.\n"
      "env: environment required of all servers that name theirs; default: the first one named.\n"
      "ranges: dict by keys of a row, such as frame; for each array [N, ...] the smallest and "
      "largest integers, [2, ...], or an empty array [0, ...] for no limit.\n"
      "connect_timeout_s=60, step_timeout_s=300: limits on a server's time.\n"
      "tls: PEM texts: certificate of the authority that signed the servers' certificates, our "
      "certificate, our key.\nauth_token: token that the servers require.\n"
      "listener: a Listener, whose streams are actors, too, as they come and go.\n"
      "listener_seed: of its streams, as seeds; a stream's index and the attempt's number are "
      "added.")
      .def(py::init(&make_actor_pool), py::arg("unroll_length"),
           py::arg("learner_queue").none(false), py::arg("inference_batcher").none(false),
           py::arg("env_server_addresses"), py::arg("initial_agent_state"))
      .def("run", &ActorPool::run, py::call_guard<NoGil>(),
           "Block until the queue or the batcher is closed. Raises the first failure: TimeoutError "
           "or ConnectionError for a server that cannot be reached or is lost.")
      .def(
          "count", &ActorPool::count,
          "Rows after the first ones of streams so far, also those at ends of episodes that are no "
          "steps.")
      .def(
          "num_connected", [](ActorPool& pool) { return pool.wait_times().num_connected(); },
          py::call_guard<NoGil>(), "Streams that are connected now.")
      .def("num_reconnects", &ActorPool::num_reconnects, "Reconnections so far.")
      .def("waits", &waits,
           "Seconds that all streams together have waited so far: for inference, for environments "
           "(the next row), for the learner (room in its queue).")
      .def("silences", &silences,
           "For each stream its index, whom it is with, what it waits for (a key of waits(), or "
           "\"connection\") and how many seconds it has done so.")
      .def("next_event", &next_event<ActorPool>,
           "Wait for the next log line about streams, which may stand for several events. Raises "
           "StopIteration after the end of run().");

  m.def(
      "query_server", &query_server, py::arg("address"), py::arg("num_envs") = py::none(),
      py::arg("timeout_s") = 60.0, py::arg("connect_timeout_s") = py::none(), py::kw_only(),
      py::arg("tls") = py::none(), py::arg("auth_token") = py::none(),
      py::arg("check") = py::none(),
      "Return the handshake of the server at this address: a dict of protocol_version, num_envs, "
      "spaces, stack_size, env (empty where the environment has no name). tls, auth_token: as for "
      "ActorPool. check: function from that dict to ranges, as for ActorPool, which the server's "
      "first row is checked against. Raises TimeoutError; ConnectionError; its subclasses "
      "ConnectionRefusedError (wrong protocol version, token or row) and ConnectionAbortedError "
      "(the environment fails), for which another attempt would fail, too.");
}

}  // namespace
}  // namespace torchbeast
