// SPDX-License-Identifier: Apache-2.0
// A stream that the learner opens to an environment server.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "credentials.h"
#include "env_stream.h"
#include "rpcenv.grpc.pb.h"
#include "stream_options.h"

namespace torchbeast {

class OutgoingStream final : public EnvStream {
 public:
  // Throws std::invalid_argument for invalid credentials.
  OutgoingStream(const std::string& address, const StreamOptions& options,
                 const Credentials& credentials);
  ~OutgoingStream() override;

  // Set a timeout for the whole stream. To be called before open().
  void limit(Seconds timeout);

  void refuse(const std::string& reason) override;

 private:
  void begin(Seconds connect_timeout, Seconds answer_timeout) override;
  bool write_message(const rpcenv::Action& action) override { return stream_->Write(action); }
  bool read_message(rpcenv::Step* step) override { return stream_->Read(step); }
  void try_cancel() override { context_.TryCancel(); }
  grpc::Status finish() override;
  std::string why_unreachable();

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
};

}  // namespace torchbeast
