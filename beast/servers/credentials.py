# SPDX-License-Identifier: Apache-2.0
"""TLS and tokens, which authenticate learner and environment servers. No torch here.

This reads the files of the command line (scripts/make_certificates.sh makes them). libtorchbeast's
`Server`, `ActorPool` and `query_server` take their contents by the same names.
"""

import functools
import logging
import os
import re
import ssl

FLAGS = ("tls_cert", "tls_key", "tls_ca", "auth_token_file")  # paths of what others must not get


def add_flags(parser):
    """Add the flags of both ends."""
    group = parser.add_argument_group("who may connect (see SECURITY.md)")
    # fmt: off
    group.add_argument("--tls_cert", metavar="FILE", help="PEM certificate of this end; who "
                       "listens is named in it.")
    group.add_argument("--tls_key", metavar="FILE", help="PEM private key of this end.")
    group.add_argument("--tls_ca", metavar="FILE",
                       help="PEM certificate of the authority that signed the other end's.")
    group.add_argument("--auth_token_file", metavar="FILE", help="File with a token that learner "
                       "and servers share. Without TLS it can be read on the network.")
    # fmt: on
    return group


def load(flags):
    """Return a dict of tls (three PEM texts) and auth_token; None for those not given.

    Raises:
      ValueError: a file cannot be used; the message names it.
    """
    tls = auth_token = None
    names = ("tls_ca", "tls_cert", "tls_key")
    missing = [f"--{name}" for name in names if not getattr(flags, name)]
    if 0 < len(missing) < 3:
        raise ValueError(
            "--tls_cert, --tls_key and --tls_ca go together, but there is no "
            f"{' and no '.join(missing)}; see scripts/make_certificates.sh"
        )
    if not missing:
        tls = tuple(_read(flags, name) for name in names)
        for name, text in zip(names, tls, strict=True):
            kind = "PRIVATE KEY" if name == "tls_key" else "CERTIFICATE"
            if not re.search(f"-----BEGIN ([A-Z]+ )*{kind}-----", text):
                raise ValueError(f"--{name} {getattr(flags, name)} is no PEM file of a {kind}")
        if "ENCRYPTED" in tls[2]:
            raise ValueError(
                f"--tls_key {flags.tls_key} is encrypted, but must not be: decrypt it with "
                f"openssl pkey -in {flags.tls_key} -out plain.key"
            )
        _check_files(flags)
    if flags.auth_token_file:
        auth_token = _read(flags, "auth_token_file").strip()
        if not re.fullmatch("[!-~]{1,4096}", auth_token):
            raise ValueError(
                f"--auth_token_file {flags.auth_token_file} should hold one line of up to 4,096 "
                "printable ASCII characters, no spaces: try openssl rand -hex 32"
            )
        if len(auth_token) < 16:
            _warn(f"--auth_token_file {flags.auth_token_file}: under 16 bytes it can be guessed")
    return {"tls": tls, "auth_token": auth_token}


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


def _check_files(flags):
    """Raise ValueError if authority, certificate or key is not valid."""
    ca, certificate, key = (
        os.path.expanduser(path) for path in (flags.tls_ca, flags.tls_cert, flags.tls_key)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
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
