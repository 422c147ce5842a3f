# SPDX-License-Identifier: Apache-2.0
"""TLS and tokens: how learner and environment servers know each other. PolyBeast's only; no torch.

The files are those of the command line; make_certificates.sh makes them. What they hold goes to
libtorchbeast: `Server`, `ActorPool` and `query_server` take it by the same names.
"""

import contextlib
import functools
import logging
import os
import re
import socket
import ssl

TIMEOUT = 10  # seconds for a handshake that shows what is wrong


def add_flags(parser):
    """Add the flags that both ends have."""
    group = parser.add_argument_group("who may connect (see SECURITY.md)")
    group.add_argument("--tls_cert", help="PEM file of this end's certificate, for TLS. "
                       "The server's must name the hosts of --server_addresses.")  # fmt: skip
    group.add_argument("--tls_key", help="PEM file of its key.")
    group.add_argument("--tls_ca", help="PEM file of the authority that has signed the other end's "
                       "certificate.")  # fmt: skip
    group.add_argument("--auth_token_file", help="File with a text that learner and servers share. "
                       "Without TLS it can be read on the way.")  # fmt: skip
    return group


def load(flags):
    """Return what the flags name as a dict of tls (three PEM texts) and auth_token, or of None.

    Raises:
      ValueError: a file cannot be used; the message names it.
    """
    if flags is None:
        return {}
    tls = auth_token = None
    names = ("tls_ca", "tls_cert", "tls_key")
    missing = [f"--{name}" for name in names if not getattr(flags, name)]
    if 0 < len(missing) < 3:
        raise ValueError(
            "--tls_cert, --tls_key and --tls_ca go together, but there is no "
            f"{' and no '.join(missing)}; see make_certificates.sh"
        )
    if not missing:
        tls = tuple(_read(flags, name) for name in names)
        for name, text in zip(names, tls, strict=True):
            kind = "PRIVATE KEY" if name == "tls_key" else "CERTIFICATE"
            if not re.search(f"-----BEGIN ([A-Z]+ )*{kind}-----", text):
                raise ValueError(f"--{name} {getattr(flags, name)} is no PEM file of a {kind}")
        if "ENCRYPTED" in tls[2]:
            raise ValueError(
                f"--tls_key {flags.tls_key} is encrypted, and nobody is there to type a password: "
                f"openssl pkey -in {flags.tls_key} -out plain.key"
            )
        _tls_context(flags)  # which raises
    if flags.auth_token_file:
        auth_token = _read(flags, "auth_token_file").strip()
        if not re.fullmatch("[!-~]{1,4096}", auth_token):
            raise ValueError(
                f"--auth_token_file {flags.auth_token_file} should hold one line of up to 4,096 "
                "printable ASCII characters without spaces: openssl rand -hex 32"
            )
        if len(auth_token) < 16:
            _warn(f"--auth_token_file {flags.auth_token_file}: so short a token can be guessed")
    return {"tls": tls, "auth_token": auth_token}


def explain_refusal(address, flags):
    """Return in words why TLS with the server fails; None where it does not, or nobody is there.

    gRPC itself says of most of it that the connection was closed.
    """
    if address.startswith("unix:"):
        return None
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    server = f"the environment server at {address}"
    try:
        with socket.create_connection((host, int(port)), TIMEOUT) as connection:
            with _tls_context(flags).wrap_socket(connection, server_hostname=host) as tls:
                accepted = _says_something(tls)
    except ssl.SSLCertVerificationError as error:
        problem = error.verify_message.rstrip(".")
        if "mismatch" in problem:
            advice = f"make it anew so that it names {host}, too (make_certificates.sh), or use a "
            advice += "name that it has in --server_addresses"
        elif "expired" in problem or "not yet" in problem:
            advice = "make it anew, or look at the clocks of both machines"
        else:
            advice = "it must be a server's, of the authority in this learner's --tls_ca"
        return f"this learner refuses the certificate of {server}: {problem}; {advice}"
    except ssl.SSLError as error:
        if error.reason != "WRONG_VERSION_NUMBER" or not flags.tls_ca:
            return None
        return (
            f"{server} speaks no TLS: start it with --tls_cert, --tls_key and --tls_ca, or this "
            "learner without them"
        )
    except OSError:
        return None
    if not flags.tls_ca:
        return f"{server} wants TLS: give this learner --tls_cert, --tls_key and --tls_ca"
    if accepted:
        return None
    return (
        f"{server} refuses the certificate of this learner, --tls_cert {flags.tls_cert}"
        f"{_verify_own(flags)}: it must be a learner's, of the authority in the server's --tls_ca, "
        "and not have expired"
    )


def _says_something(tls):
    """Say whether the server goes on after the handshake, in which it has not judged us yet."""
    try:
        return bool(tls.recv(1))
    except ConnectionResetError:
        return False


def _verify_own(flags):
    """Return in brackets what servers of our own authority would say of our certificate."""
    client = _tls_context(flags)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    _load_files(server, flags)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    try:
        for end in 2 * ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return f" ({error.verify_message})"
    return ""


def _read(flags, name):
    path = os.path.expanduser(getattr(flags, name))
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
            readable_by_all = os.fstat(file.fileno()).st_mode & 0o004
    except OSError as error:
        raise ValueError(f"cannot read --{name} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--{name} {path} should hold ASCII text, but does not") from None
    if not text.strip():
        raise ValueError(f"--{name} {path} is empty")
    if readable_by_all and name in ("tls_key", "auth_token_file"):
        _warn(f"everybody on this machine can read --{name} {path}: chmod 600 {path}")
    return text


@functools.cache  # once is enough
def _warn(text):
    logging.warning("%s", text)


def _tls_context(flags):
    """Return a learner's end of TLS, as Python knows it; without files, one that trusts anybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if flags.tls_ca:
        _load_files(context, flags)
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _load_files(context, flags):
    """Raises ValueError where authority, certificate and key are not what they should be."""
    ca, certificate, key = (
        os.path.expanduser(path) for path in (flags.tls_ca, flags.tls_cert, flags.tls_key)
    )
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ValueError(f"--tls_ca {ca} holds no certificate: {error}") from None
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"--tls_key {key} is not the key of the certificate in --tls_cert {certificate}"
            ) from None
        raise ValueError(
            f"cannot use --tls_cert {certificate} with --tls_key {key}: {error}"
        ) from None
