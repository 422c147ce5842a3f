// SPDX-License-Identifier: Apache-2.0
// The module libtorchbeast._C: bindings only.
//
// Whatever can wait gives up the GIL first, and holds no Python object by value meanwhile.
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
#include "env_stream.h"
#include "errors.h"
#include "no_gil.h"
#include "python_arrays.h"
#include "stream_options.h"

namespace py = pybind11;

namespace torchbeast {
namespace {

// Memory that GPUs copy from by themselves; torch allocates it.
MemoryPool::Block allocate_pinned(size_t num_bytes) {
  py::gil_scoped_acquire gil;
  const py::module_ torch = py::module_::import("torch");
  auto* tensor = new py::object(torch.attr("empty")(
      num_bytes, py::arg("dtype") = torch.attr("uint8"), py::arg("pin_memory") = true));
  auto* pointer = reinterpret_cast<std::byte*>(tensor->attr("data_ptr")().cast<uintptr_t>());
  return MemoryPool::Block(pointer, [tensor](std::byte*) {
    py::gil_scoped_acquire gil;
    delete tensor;
  });
}

// Raises where memory is to be pinned and there is no GPU.
std::shared_ptr<MemoryPool> make_pool(bool pin_memory) {
  if (!pin_memory) return std::make_shared<MemoryPool>();
  allocate_pinned(1);
  return std::make_shared<MemoryPool>(allocate_pinned);
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
  std::optional<Nest<Array>> batch;
  {
    NoGil no_gil;
    batch = queue.dequeue();
  }
  if (!batch) throw py::stop_iteration();
  return to_python(*batch);
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
  {
    NoGil no_gil;
    arrays = batcher.compute(std::move(arrays));
  }
  return to_python(arrays);
}

std::unique_ptr<Batch> next_batch(DynamicBatcher& batcher) {
  std::unique_ptr<Batch> batch;
  {
    NoGil no_gil;
    batch = batcher.next();
  }
  if (!batch) throw py::stop_iteration();
  return batch;
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

ActorPool::Options read_options(const py::dict& keywords) {
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
  if (num_known < keywords.size()) {
    throw py::type_error(
        py::str("ActorPool got an unknown keyword among {}").format(py::list(keywords)));
  }
  options.credentials = make_credentials(tls, std::move(auth_token));
  options.ranges = from_python(ranges).dict();
  return options;
}

std::shared_ptr<ActorPool> make_actor_pool(int64_t unroll_length,
                                           std::shared_ptr<BatchingQueue> learner_queue,
                                           std::shared_ptr<DynamicBatcher> inference_batcher,
                                           std::vector<std::string> env_server_addresses,
                                           py::handle initial_agent_state,
                                           const py::kwargs& keywords) {
  return std::make_shared<ActorPool>(unroll_length, std::move(learner_queue),
                                     std::move(inference_batcher), std::move(env_server_addresses),
                                     from_python(initial_agent_state), read_options(keywords));
}

// Of what peers say, which may be any bytes, to be logged.
py::object to_text(const std::string& bytes) {
  return py::module_::import("libtorchbeast.access").attr("printable")(py::bytes(bytes));
}

void set_text_error(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, to_text(error.what()).ptr());
}

py::object next_event(ActorPool& pool) {
  std::optional<std::string> event;
  {
    NoGil no_gil;
    event = pool.next_event();
  }
  if (!event) throw py::stop_iteration();
  return to_text(*event);
}

py::dict query_server(const std::string& address, std::optional<int64_t> num_envs, double timeout_s,
                      std::optional<double> connect_timeout_s, const Tls& tls,
                      std::optional<std::string> auth_token, const py::object& check) {
  rpcenv::Step first;
  {
    NoGil no_gil;
    EnvStream stream(address, StreamOptions{num_envs, "", false, false},
                     make_credentials(tls, std::move(auth_token)));
    const std::chrono::duration<double> timeout(timeout_s);
    stream.limit(timeout);
    const std::chrono::duration<double> connect_timeout(connect_timeout_s.value_or(timeout_s));
    first = stream.open(connect_timeout, timeout);
  }
  const rpcenv::Handshake& handshake = first.handshake();
  py::dict result;
  result["protocol_version"] = handshake.protocol_version();
  result["num_envs"] = handshake.num_envs();
  result["spaces"] = handshake.spaces();
  result["stack_size"] = handshake.stack_size();
  result["env"] = handshake.env();
  if (!check.is_none()) {
    Rollout::Ranges ranges = from_python(check(result)).dict();
    NoGil no_gil;
    check_first_row(address, first, std::move(ranges));
  }
  return result;
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "PolyBeast's core: queues, dynamic batching, actors.";

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

  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>>(
      m, "BatchingQueue",
      "A queue of nests of arrays that gives out batches: iterate over it. Sizes count columns "
      "along batch_dim. check_inputs is there for old code: inputs are always checked.")
      .def(py::init(&make_queue), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::kw_only(), py::arg("pin_memory") = false)
      .def("enqueue", &enqueue, py::arg("nest"),
           "Add a nest of tensors [..., columns, ...]; waits while the queue is full. Raises "
           "ValueError for an empty nest or too few dimensions, ClosedBatchingQueue when closed.")
      .def("close", &BatchingQueue::close, py::call_guard<NoGil>(),
           "Wake and refuse all. Raises RuntimeError the second time.")
      .def("is_closed", &BatchingQueue::is_closed, py::call_guard<NoGil>())
      .def("size", &BatchingQueue::size, py::call_guard<NoGil>(), "Columns that wait.")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &dequeue, "The next batch: a nest of tensors, the caller's own.");

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>>(
      m, "DynamicBatcher",
      "Joins the calls of many threads into batches: iterate over it, and set the outputs of each. "
      "Sizes count columns along batch_dim. check_outputs is there for old code: outputs are "
      "always checked.")
      .def(py::init(&make_batcher), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::kw_only(), py::arg("pin_memory") = false)
      .def("compute", &compute, py::arg("inputs"),
           "Wait for the outputs of these inputs. Raises AsyncError if the batch was dropped, "
           "ClosedBatchingQueue when closed.")
      .def("close", &DynamicBatcher::close, py::call_guard<NoGil>(),
           "Wake and refuse all. Raises RuntimeError the second time.")
      .def("is_closed", &DynamicBatcher::is_closed, py::call_guard<NoGil>())
      .def("size", &DynamicBatcher::size, py::call_guard<NoGil>(), "Columns that wait for a batch.")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &next_batch);

  py::class_<Batch>(m, "Batch", "Inputs of several callers.")
      .def(
          "get_inputs", [](const Batch& batch) { return to_python(batch.inputs()); },
          "Nest of tensors, joined along batch_dim.")
      .def("set_outputs", &set_outputs, py::arg("outputs"),
           "Answer the callers. Raises RuntimeError the second time, ValueError for too few "
           "dimensions or another batch size.");

  py::class_<ActorPool, std::shared_ptr<ActorPool>>(
      m, "ActorPool",
      "Actors: one thread a stream, that is, for each entry of env_server_addresses.\n\n"
      "The batcher gets ((frame, reward, done, episode_step, episode_return), agent_state), all "
      "[1, N, ...], and must answer ((action, ...), agent_state). The queue gets ((env outputs, "
      "agent outputs), initial_agent_state), the outputs [T + 1, N, ...].\n\n"
      "Keywords, None being as good as not given:\n"
      "dict_outputs=False: env outputs are a dict of all keys of a row (see "
      "libtorchbeast/rows.py), agent outputs one with an action.\n"
      "num_envs, expected_num_envs: N to ask for, and N that the handshakes must have.\n"
      "seeds: one a stream, each ints separated by commas.\n"
      "newest_frame_only=False: have stacked frames sent one by one.\n"
      "reconnect=False: a server that is lost ends only its rollout.\n"
      "spaces: what the handshakes must have; else as the first server has them.\n"
      "env: the same of the environment's name, but servers that name none are accepted.\n"
      "ranges: what rows may hold: a dict by their keys, such as frame; for each array [N, ...] "
      "one [2, ...] of the least and the largest integers, or [0, ...] where there is no limit.\n"
      "connect_timeout_s=60, step_timeout_s=300: how long servers may take.\n"
      "tls: PEM texts of the authority that signed the servers' certificates, of our certificate "
      "and of its key.\n"
      "auth_token: which the servers ask for.")
      .def(py::init(&make_actor_pool), py::arg("unroll_length"), py::arg("learner_queue"),
           py::arg("inference_batcher"), py::arg("env_server_addresses"),
           py::arg("initial_agent_state"))
      .def(
          "run", &ActorPool::run, py::call_guard<NoGil>(),
          "Blocks until the queue or the batcher is closed. Raises the first failure: TimeoutError "
          "or ConnectionError where servers cannot be reached or are lost.")
      .def("count", &ActorPool::count, "Environment steps so far.")
      .def("num_connected", &ActorPool::num_connected, "Streams that have a server now.")
      .def("num_reconnects", &ActorPool::num_reconnects)
      .def(
          "waits",
          [](ActorPool& pool) {
            const auto waits = [&] {
              NoGil no_gil;
              return pool.waits();
            }();
            py::dict result;
            for (size_t i = 0; i < waits.size(); ++i) result[ActorPool::kWaits[i]] = waits[i];
            return result;
          },
          "Seconds that all streams together have waited so far: for inference, for their "
          "environments' next rows, and for the learner, that is, for room in its queue.")
      .def("silences", &ActorPool::silences, py::call_guard<NoGil>(),
           "What each stream waits for, as in waits() or \"connection\", and for how many seconds.")
      .def("next_event", &next_event,
           "Wait for the next line about a server that was lost or is back. Raises StopIteration "
           "after the end of run().");

  m.def(
      "query_server", &query_server, py::arg("address"), py::arg("num_envs") = py::none(),
      py::arg("timeout_s") = 60.0, py::arg("connect_timeout_s") = py::none(), py::kw_only(),
      py::arg("tls") = py::none(), py::arg("auth_token") = py::none(),
      py::arg("check") = py::none(),
      "What the server at this address says of itself: a dict of protocol_version, num_envs, "
      "spaces, stack_size, env (empty where it has no name). tls, auth_token: as ActorPool's. "
      "check: called with that dict; returns ranges, as ActorPool's, for the first row. "
      "Raises TimeoutError; ConnectionError, of which ConnectionRefusedError (another protocol "
      "version, token or row) and ConnectionAbortedError (its environments fail) will come again.");
}

}  // namespace
}  // namespace torchbeast
