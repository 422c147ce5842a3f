// SPDX-License-Identifier: Apache-2.0
#include "listener.h"

#include <fcntl.h>
#include <grpc/compression.h>
#include <grpcpp/resource_quota.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "errors.h"
#include "wire.h"

namespace torchbeast {

namespace {

using Clock = EnvStream::Clock;

constexpr auto kPatience = std::chrono::milliseconds(250);  // between two looks for an end
constexpr int64_t kSpareThreads = 64;                       // beside those of streams
constexpr size_t kSpareConnections = 128;  // beside those of streams; strangers hold some
constexpr size_t kMaxReasonBytes = 500;    // of a status, which is metadata
constexpr int64_t kMaxAsked = 8;           // streams of a query at the same time, but for slow ones
constexpr auto kSlow = std::chrono::seconds(5);
constexpr auto kShutdownTime = std::chrono::seconds(2);

// Whether two texts are equal, in a time that does not show how much of a guess is right.
bool are_equal(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

// A connection that gRPC closes. Its descriptor may then be that of another file.
struct Connection {
  int fd;
  ino_t inode;
};

ino_t inode_of(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

bool is_closed(const Connection& connection) { return inode_of(connection.fd) != connection.inode; }

std::string peer_of(const grpc::ServerContext& context) {
  std::string peer = context.peer();  // ipv4:host:port, ipv6:[host]:port or unix:
  if (peer.compare(0, 3, "ipv") == 0) peer.erase(0, 5);
  for (const auto& [code, bracket] : {std::pair("%5B", "["), std::pair("%5D", "]")}) {
    const size_t place = peer.find(code);
    if (place != std::string::npos) peer.replace(place, 3, bracket);
  }
  return peer;
}

// A text for a status, of ASCII: cut anywhere, other characters might be cut in two.
std::string to_reason(const std::string& text) {
  std::string reason = text.substr(0, kMaxReasonBytes);
  const auto is_odd = [](char c) { return c < ' ' || '~' < c; };
  std::replace_if(reason.begin(), reason.end(), is_odd, '?');
  return reason;
}

std::shared_ptr<grpc::ServerCredentials> make_credentials(const Credentials& credentials) {
  if (!credentials.tls) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = credentials.tls->ca;
  options.pem_key_cert_pairs = {{credentials.tls->key, credentials.tls->certificate}};
  return grpc::SslServerCredentials(options);
}

}  // namespace

IncomingStream::IncomingStream(grpc::ServerContext* context, Messages* messages)
    : EnvStream("the environment process at " + peer_of(*context)),
      messages_(messages),
      context_(context) {}

void IncomingStream::begin(Seconds, Seconds answer_timeout) {
  rpcenv::Action hello;
  hello.set_protocol_version(kProtocolVersion);
  for (const auto& [name, text] : options_.to_texts()) (*hello.mutable_options())[name] = text;
  begin_wait(answer_timeout);
  if (!messages_->Write(hello)) fail();
}

void IncomingStream::try_cancel() {
  Lock lock(mutex_);
  if (context_ != nullptr) context_->TryCancel();
}

bool IncomingStream::is_gone() {
  Lock lock(mutex_);
  return context_ == nullptr || context_->IsCancelled();
}

void IncomingStream::end() {
  Lock lock(mutex_);
  context_ = nullptr;
}

grpc::Status IncomingStream::finish() {
  if (is_gone()) return {grpc::StatusCode::CANCELLED, "the connection or its process has ended"};
  return {grpc::StatusCode::UNKNOWN, "it ended the stream, or sent a malformed message"};
}

Listener::Listener(int socket, int64_t max_streams, Credentials credentials)
    : socket_(socket), max_streams_(max_streams), credentials_(std::move(credentials)) {
  credentials_.check();
  if (max_streams_ < 1) throw std::invalid_argument("max_streams must be at least 1");
  grpc::ServerBuilder builder;
  builder.RegisterService(this);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // No compressed messages: gRPC's limit is on the compressed size, which bounds no memory.
  builder.AddChannelArgument(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                             1 << GRPC_COMPRESS_NONE);
  // Connections without a stream are closed within 45 s: those that say nothing, those that open
  // none, and those that open one that is refused after the other. Streams go on after such an age.
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 2);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 8192);
  // A peer that was unplugged or stopped sends nothing: ping it, and disconnect without an answer.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  // Long, since some environments keep their process from answering while they are made or reset.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 50'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // One read and one window for a batch of frames, not dozens.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 1 << 20);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 << 20);
  // Else streams that are opened and reset, thousands in a second, have as many threads. With a
  // few to spare, since gRPC refuses streams before it has as many.
  constexpr int64_t kMaxThreads = std::numeric_limits<int>::max();
  builder.SetResourceQuota(grpc::ResourceQuota().SetMaxThreads(
      static_cast<int>(std::min(max_streams_ + kSpareThreads, kMaxThreads))));
  if (credentials_.tls) {  // an acceptor does not say whether gRPC can use them
    rpcenv::RPCLearner::Service service;
    grpc::ServerBuilder probe;
    probe.RegisterService(&service);
    probe.AddListeningPort("127.0.0.1:0", make_credentials(credentials_));
    if (!probe.BuildAndStart()) {
      throw std::invalid_argument("gRPC cannot serve with that certificate and key");
    }
  }
  // Connections are accepted here: gRPC would accept any number, and none any more once there were
  // no file descriptors left.
  acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      make_credentials(credentials_));
  server_ = builder.BuildAndStart();
  if (!server_) throw std::runtime_error("gRPC cannot serve");
  accepting_ = std::thread([this] { accept_connections(); });
}

Listener::~Listener() { close(); }

void Listener::accept_connections() {
  std::vector<Connection> connections;  // some of which may be closed already
  const size_t max_connections = static_cast<size_t>(max_streams_) + kSpareConnections;
  fcntl(socket_, F_SETFL, O_NONBLOCK);
  while (!closed_) {
    if (connections.size() >= max_connections) {
      connections.erase(std::remove_if(connections.begin(), connections.end(), is_closed),
                        connections.end());
    }
    pollfd wait{socket_, POLLIN, 0};
    const bool is_full = connections.size() >= max_connections;  // others wait in the kernel
    const int fd = !is_full && poll(&wait, 1, kPatience.count()) > 0
                       ? accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)
                       : -1;
    if (fd < 0) {
      // Also where there are no file descriptors left.
      if (is_full || wait.revents != 0) std::this_thread::sleep_for(kPatience);
      continue;
    }
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails for unix sockets
    connections.push_back({fd, inode_of(fd)});
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = socket_;
    connection.fd = fd;
    acceptor_->HandleNewConnection(&connection);
  }
}

// An error status for a stream without the token.
grpc::Status Listener::refuse_stranger(const grpc::ServerContext& context) {
  if (!credentials_.auth_token) return grpc::Status::OK;
  const auto& metadata = context.client_metadata();
  const auto token = metadata.find("auth-token");
  if (token != metadata.end() &&
      are_equal({token->second.data(), token->second.size()}, *credentials_.auth_token)) {
    return grpc::Status::OK;
  }
  events_.report("token",
                 "refused a stream without this learner's token, from " + peer_of(context));
  return {grpc::StatusCode::UNAUTHENTICATED,
          std::string("this learner asks for a token, but ") +
              (token == metadata.end() ? "there is none" : "this is another one") +
              ": give both ends one --auth_token_file"};
}

grpc::Status Listener::StreamingLearner(grpc::ServerContext* context,
                                        IncomingStream::Messages* messages) {
  const grpc::Status refusal = refuse_stranger(*context);
  if (!refusal.ok()) return refusal;
  {
    Lock lock(mutex_);
    if (closed_) return {grpc::StatusCode::UNAVAILABLE, "this learner ends"};
    if (num_streams_ >= max_streams_) {
      const std::string reason = "this learner has " + std::to_string(num_streams_) +
                                 " streams already, and no more at once (its --max_streams)";
      events_.report("full", "refused " + peer_of(*context) + ": " + reason);
      return {grpc::StatusCode::RESOURCE_EXHAUSTED, reason};
    }
    ++num_streams_;
  }
  messages->SendInitialMetadata();  // says that the stream was accepted
  const auto stream = std::make_shared<IncomingStream>(context, messages);
  const std::string failure = serve(stream);
  stream->end();
  {
    Lock lock(mutex_);
    --num_streams_;
  }
  if (!stream->refusal().empty()) {
    return {grpc::StatusCode::FAILED_PRECONDITION, to_reason(stream->refusal())};
  }
  if (closed_) return {grpc::StatusCode::UNAVAILABLE, "this learner ends"};
  if (failure.empty()) return grpc::Status::OK;
  return {grpc::StatusCode::INVALID_ARGUMENT, to_reason(failure)};
}

// Returns why the stream has failed; empty: it has not.
std::string Listener::serve(const std::shared_ptr<IncomingStream>& stream) {
  std::shared_ptr<Use> use;
  while (!use) {
    if (stream->is_gone()) return "";
    Lock lock(mutex_);
    if (closed_) return "";
    if (use_ && use_->num_streams < use_->max_streams) {
      use = use_;
      ++use->num_streams;
    } else {
      changed_.wait_until(lock, Clock::now() + kPatience);
    }
  }
  std::string failure = use->play(stream);
  {
    Lock lock(mutex_);
    --use->num_streams;
  }
  changed_.notify_all();
  return failure;
}

std::shared_ptr<Listener::Use> Listener::begin_use(Play play, int64_t max_streams) {
  const auto use = std::make_shared<Use>(Use{std::move(play), max_streams});
  {
    Lock lock(mutex_);
    use_ = use;
  }
  changed_.notify_all();
  return use;
}

void Listener::end_use(const std::shared_ptr<Use>& use) {
  Lock lock(mutex_);
  if (use_ == use) use_ = nullptr;
  while (use->num_streams > 0) changed_.wait(lock);
}

// Several at a time; those that are slow to make their environments keep no others waiting.
void Listener::query(const StreamOptions& options, EnvStream::Seconds answer_timeout,
                     const Check& check) {
  // All guarded by mutex_.
  std::vector<std::pair<std::shared_ptr<IncomingStream>, Clock::time_point>> asked;  // since when
  bool is_over = false, has_answer = false;
  std::exception_ptr check_error;

  const auto play = [&](const std::shared_ptr<IncomingStream>& stream) {
    {
      Lock lock(mutex_);
      if (is_over) return std::string();
      asked.emplace_back(stream, Clock::now());
    }
    std::string failure;
    std::exception_ptr error;
    try {
      stream->set_options(options);
      check(stream->peer(), stream->open(answer_timeout, answer_timeout));
    } catch (const RefusedError& refused) {
      failure = refused.what();
      stream->refuse(failure);
    } catch (const ServerError& lost) {
      failure = lost.what();
    } catch (...) {
      error = std::current_exception();
    }
    Lock lock(mutex_);
    asked.erase(std::find_if(asked.begin(), asked.end(),
                             [&](const auto& item) { return item.first == stream; }));
    if (!is_over && !failure.empty()) events_.report("query", failure);
    if (is_over || has_answer) return failure;
    if (error) check_error = error;
    has_answer = failure.empty() && !error;
    return failure;
  };
  const auto use = begin_use(play, kMaxAsked);
  for (bool is_last = false; !is_last;) {
    std::vector<std::shared_ptr<IncomingStream>> streams;
    {
      Lock lock(mutex_);
      if (!has_answer && !check_error) changed_.wait_until(lock, Clock::now() + kPatience);
      is_last = is_over = has_answer || check_error || closed_ || use_ != use;
      use->max_streams = kMaxAsked;
      for (const auto& [stream, since] : asked) {
        streams.push_back(stream);
        if (Clock::now() - since > kSlow) ++use->max_streams;
      }
    }
    for (const auto& stream : streams) is_last ? stream->cancel() : stream->cancel_if_late();
  }
  end_use(use);
  if (check_error) std::rethrow_exception(check_error);
  if (!has_answer) throw ClosedError("the listener is closed, or used by an ActorPool");
}

int64_t Listener::num_streams() {
  Lock lock(mutex_);
  return num_streams_;
}

void Listener::close() {
  std::call_once(closing_, [this] {
    closed_ = true;
    changed_.notify_all();
    accepting_.join();
    server_->Shutdown(std::chrono::system_clock::now() + kShutdownTime);
    events_.close();
  });
}

}  // namespace torchbeast
