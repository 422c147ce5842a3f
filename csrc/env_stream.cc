// SPDX-License-Identifier: Apache-2.0
#include "env_stream.h"

#include <grpc/compression.h>

#include <algorithm>
#include <utility>

#include "errors.h"
#include "wire.h"

namespace torchbeast {

namespace {

constexpr auto kGrace = std::chrono::seconds(1);            // time for a failed stream to end
constexpr std::chrono::duration<double> kLongest(1e9);      // a longer timeout would overflow
constexpr size_t kMaxErrorBytes = 20'000;                   // longer errors are shortened
constexpr auto kPatience = std::chrono::milliseconds(200);  // between two checks of cancelled_

std::shared_ptr<grpc::Channel> make_channel(const std::string& address,
                                            const Credentials& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A peer that was unplugged or stopped sends nothing: ping it, and disconnect without an answer.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  // Long, since some environments keep a Python server from answering while they are made or reset.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 50'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MIN_SENT_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  // Notice quickly that a server is back; the caller decides how often to try.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  // Each stream has a connection of its own, even to the same server.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // One read and one window for a batch of frames, not dozens.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 << 20);
  // No compressed messages: gRPC's limit is on the compressed size, which bounds no memory.
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
  auto channel_credentials = grpc::InsecureChannelCredentials();
  if (credentials.tls) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = credentials.tls->ca;
    options.pem_cert_chain = credentials.tls->certificate;
    options.pem_private_key = credentials.tls->key;
    channel_credentials = grpc::SslCredentials(options);
  }
  return grpc::CreateCustomChannel(address, channel_credentials, arguments);
}

}  // namespace

EnvStream::EnvStream(std::string address, const StreamOptions& options,
                     const Credentials& credentials)
    : address_(std::move(address)) {
  credentials.check();
  channel_ = make_channel(address_, credentials);
  if (credentials.auth_token) context_.AddMetadata("auth-token", *credentials.auth_token);
  if (options.num_envs) context_.AddMetadata("num-envs", std::to_string(*options.num_envs));
  if (!options.seed.empty()) context_.AddMetadata("seed", options.seed);
  if (options.newest_frame_only) context_.AddMetadata("newest-frame-only", "1");
  if (options.truncated_rows) context_.AddMetadata("truncated-rows", "1");
}

EnvStream::~EnvStream() {
  if (stream_) {
    context_.TryCancel();
    stream_->Finish();
  }
}

const rpcenv::Step& EnvStream::open(std::chrono::duration<double> connect_timeout,
                                    std::chrono::duration<double> answer_timeout) {
  const auto deadline = Clock::now() + connect_timeout;
  while (!channel_->WaitForConnected(std::chrono::system_clock::now() + kPatience)) {
    if (cancelled_) throw ConnectionError("cancelled");
    if (Clock::now() > deadline) {
      throw TimeoutError("no environment server at " + address_ + " within " +
                         seconds_text(connect_timeout) + why_unreachable());
    }
  }
  begin_wait(answer_timeout);
  stream_ = rpcenv::RPCEnvServer::NewStub(channel_)->StreamingEnv(&context_);  // may block, too
  read();
  if (!step_.has_handshake()) {
    throw ConnectionError("the environment server at " + address_ + " sent no handshake");
  }
  const rpcenv::Handshake& handshake = step_.handshake();
  if (handshake.protocol_version() != kProtocolVersion) {
    throw RefusedError("refused: the environment server at " + address_ +
                       " speaks protocol version " + std::to_string(handshake.protocol_version()) +
                       ", but this learner speaks " + std::to_string(kProtocolVersion) +
                       ": update the older one");
  }
  if (handshake.num_envs() < 1 || handshake.num_envs() > kMaxMessageBytes) {
    throw RefusedError("refused: the environment server at " + address_ + " has " +
                       std::to_string(handshake.num_envs()) + " environments a stream");
  }
  return step_;
}

// gRPC's reason why it cannot reach the server: it gives one only to a call, so make one.
std::string EnvStream::why_unreachable() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kGrace);
  context.AddMetadata("num-envs", "0");  // invalid: a server that is there after all refuses it
  const auto stream = rpcenv::RPCEnvServer::NewStub(channel_)->StreamingEnv(&context);
  rpcenv::Step step;
  stream->Read(&step);
  const grpc::Status status = stream->Finish();
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  return ": " + status.error_message();
}

void EnvStream::limit(std::chrono::duration<double> timeout) {
  context_.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::duration_cast<std::chrono::milliseconds>(std::min(timeout, kLongest)));
}

void EnvStream::write(const Nest<Array>& action, std::chrono::duration<double> timeout) {
  // On the wire there is no time dimension.
  encode(action.map([](const Array& array) {
    return ArrayView{array.dtype, Shape(array.shape.begin() + 1, array.shape.end()),
                     array.data.get()};
  }),
         action_.mutable_action());
  begin_wait(timeout);
  if (!stream_->Write(action_)) fail();
}

const rpcenv::Step& EnvStream::read() {
  if (!stream_->Read(&step_)) fail();
  deadline_ = 0;
  if (!step_.error().empty()) {
    std::string error = step_.error();
    if (error.size() > kMaxErrorBytes) {  // the end of a traceback has the error
      error = "..." + error.substr(error.size() - kMaxErrorBytes);
    }
    throw EnvironmentError("the environment server at " + address_ + " says: " + error);
  }
  return step_;
}

void EnvStream::refuse(const std::string& reason) {
  rpcenv::Action action;
  action.set_refusal(reason);
  begin_wait(kGrace);
  // If cancelled now, the message could be lost: wait until the server has ended the stream.
  if (stream_->Write(action)) stream_->Read(&step_);
  deadline_ = 0;
}

void EnvStream::cancel() {
  cancelled_ = true;
  context_.TryCancel();
}

void EnvStream::begin_wait(std::chrono::duration<double> timeout) {
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::min(timeout, kLongest));
  deadline_ = end.time_since_epoch().count();
}

void EnvStream::cancel_if_late() {
  const Clock::rep deadline = deadline_;
  if (deadline != 0 && Clock::now().time_since_epoch().count() > deadline) {
    late_ = true;
    context_.TryCancel();
  }
}

void EnvStream::extend(Clock::duration time) {
  Clock::rep deadline = deadline_;  // the stream's thread may change it meanwhile
  while (deadline != 0 && !deadline_.compare_exchange_weak(deadline, deadline + time.count())) {
  }
}

void EnvStream::fail() {
  const bool too_slow = late_;
  // A malformed message leaves the stream open, so that Finish() could block for long.
  begin_wait(kGrace);
  const grpc::Status status = stream_->Finish();
  deadline_ = 0;
  stream_.reset();
  if (too_slow) {
    throw ConnectionError("the environment server at " + address_ + " hangs: it took too long");
  }
  if (late_) {
    throw ConnectionError("the environment server at " + address_ +
                          " sent a malformed message, or did not end its stream");
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    throw TimeoutError("the environment server at " + address_ + " did not answer in time");
  }
  if (status.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
    throw RefusedError("refused by the environment server at " + address_ + ": " +
                       status.error_message());
  }
  std::string reason = status.error_message();
  if (reason.empty()) reason = "it ended the stream";
  throw ConnectionError("the environment server at " + address_ + " was lost: " + reason);
}

}  // namespace torchbeast
