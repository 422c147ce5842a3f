// SPDX-License-Identifier: Apache-2.0
#include "outgoing_stream.h"

#include <grpc/compression.h>

#include <algorithm>

#include "errors.h"
#include "wire.h"

namespace torchbeast {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(200);  // between two looks for cancel()

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

OutgoingStream::OutgoingStream(const std::string& address, const StreamOptions& options,
                               const Credentials& credentials)
    : EnvStream("the environment server at " + address), address_(address) {
  credentials.check();
  channel_ = make_channel(address, credentials);
  if (credentials.auth_token) context_.AddMetadata("auth-token", *credentials.auth_token);
  for (const auto& [name, text] : options.to_texts()) context_.AddMetadata(name, text);
}

OutgoingStream::~OutgoingStream() {
  if (stream_) {
    context_.TryCancel();
    stream_->Finish();
  }
}

void OutgoingStream::begin(Seconds connect_timeout, Seconds answer_timeout) {
  const auto deadline = Clock::now() + connect_timeout;
  while (!channel_->WaitForConnected(std::chrono::system_clock::now() + kPatience)) {
    if (is_cancelled()) throw ConnectionError("cancelled");
    if (Clock::now() > deadline) {
      throw TimeoutError("no environment server at " + address_ + " within " +
                         seconds_text(connect_timeout) + why_unreachable());
    }
  }
  begin_wait(answer_timeout);
  stream_ = rpcenv::RPCEnvServer::NewStub(channel_)->StreamingEnv(&context_);  // may block, too
}

// gRPC's reason why it cannot reach the server: it gives one only to a call, so make one.
std::string OutgoingStream::why_unreachable() {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(1));
  context.AddMetadata("num-envs", "0");  // invalid: a server that is there after all refuses it
  const auto stream = rpcenv::RPCEnvServer::NewStub(channel_)->StreamingEnv(&context);
  rpcenv::Step step;
  stream->Read(&step);
  const grpc::Status status = stream->Finish();
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE) return "";
  return ": " + status.error_message();
}

void OutgoingStream::limit(Seconds timeout) {
  context_.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::duration_cast<std::chrono::milliseconds>(std::min(timeout, kLongest)));
}

void OutgoingStream::refuse(const std::string& reason) {
  rpcenv::Action action;
  action.set_refusal(reason);
  begin_wait(kGrace);
  // If cancelled now, the message could be lost: wait until the server has ended the stream.
  rpcenv::Step step;
  if (stream_->Write(action)) stream_->Read(&step);
  end_wait();
}

grpc::Status OutgoingStream::finish() {
  const grpc::Status status = stream_->Finish();
  stream_.reset();
  return status;
}

}  // namespace torchbeast
