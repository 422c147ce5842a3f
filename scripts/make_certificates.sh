#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Make certificates for --tls_cert, --tls_key and --tls_ca of polybeast.py and polybeast_env.py.
#
#   sh scripts/make_certificates.sh FOLDER HOST...
#
# makes an authority (ca.pem, ca.key), a certificate for servers (server.pem, server.key) that names
# each HOST as learners do in --server_addresses, be it a name or an IP address, and one for learners
# (learner.pem, learner.key). An authority that is there already signs new certificates, so that the
# other machines go on with the old ca.pem. They are valid for DAYS days, by default 365.
#
# Keep ca.key to yourself: who has it can make more of them.
set -eu
umask 077

if [ $# -lt 2 ]; then
  echo "usage: sh $0 FOLDER HOST..." >&2
  exit 2
fi
command -v openssl >/dev/null || { echo "openssl is missing: apt-get install openssl" >&2; exit 1; }
folder=$1
shift
mkdir -p "$folder"
cd "$folder"

names=DNS:localhost,IP:127.0.0.1,IP:::1
for host in "$@"; do
  case $host in
    *[!0-9a-zA-Z.:*-]* | '') echo "$host is neither a name nor an IP address" >&2; exit 2 ;;
    *:*) names=$names,IP:$host ;;
    *[!0-9.]*) names=$names,DNS:$host ;;
    *) names=$names,IP:$host ;;
  esac
done

new_key() {
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

trap 'rm -f extensions request messages ./*.new' EXIT
if [ ! -s ca.key ]; then
  new_key ca.key.new
  mv ca.key.new ca.key
fi
if [ ! -s ca.pem ]; then  # of this key: what it has signed stays valid
  openssl req -x509 -new -key ca.key -days 3650 -subj "/CN=PolyBeast authority" -out ca.pem.new
  mv ca.pem.new ca.pem
fi

# A server's certificate is no learner's, nor the other way round.
for who in server learner; do
  case $who in
    server) extensions="extendedKeyUsage = serverAuth\nsubjectAltName = $names" ;;
    learner) extensions="extendedKeyUsage = clientAuth" ;;
  esac
  printf "basicConstraints = critical, CA:FALSE\nkeyUsage = critical, digitalSignature\n$extensions\n" \
    >extensions
  # Keys and certificates that are there stay until there are new ones.
  new_key $who.key.new
  openssl req -new -key $who.key.new -subj "/CN=PolyBeast $who" -out request
  openssl x509 -req -in request -CA ca.pem -CAkey ca.key -set_serial "0x$(openssl rand -hex 16)" \
    -days "${DAYS:-365}" -extfile extensions -out $who.pem.new 2>messages || { cat messages >&2; exit 1; }
  mv $who.key.new $who.key
  mv $who.pem.new $who.pem
done
echo "Servers get server.pem, server.key and ca.pem of $folder; learners learner.pem, learner.key, ca.pem"
