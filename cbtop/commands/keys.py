"""`cbtop keys`: manage the viewers that may listen over the network, and their keys."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from cbtop.errors import UsageError
from cbtop.protocol.errors import KeysError
from cbtop.protocol.keys import allow, allowed, keys_dir, make_pair, pairs, parse_public_key, revoke
from cbtop.protocol.vocabulary import DAEMON_KEY

DESCRIPTION = (
    "Make CURVE key pairs, and edit the list of viewers that the daemon of this machine accepts. They are in "
    "$CBTOP_KEYS_DIR, or in cbtop/keys in $XDG_CONFIG_HOME or ~/.config, and only you can read them. Secret keys are "
    "never shown."
)
EPILOG = """\
examples:
  cbtop keys new daemon                    on the machine of the processes, once
  cbtop keys new viewer                    on your own machine, once; prints the public key
  cbtop keys allow laptop PUBLIC_KEY       on the machine of the processes, for each viewer
  cbtop keys revoke laptop                 an open connection ends within a second
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key pair")
    new.add_argument("name", metavar="NAME", help="name of the pair, such as `daemon` or `viewer` (their defaults)")
    new.set_defaults(action=_new)
    listing = actions.add_parser("list", help="show the key pairs and the allowed viewers: public keys only")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(action=_list)
    letting_in = actions.add_parser("allow", help="accept a viewer")
    letting_in.add_argument("name", metavar="NAME", help="name of the viewer on this machine")
    letting_in.add_argument("key", metavar="PUBLIC_KEY|FILE", help="64 hexadecimal digits, or its NAME.key file")
    letting_in.set_defaults(action=_allow)
    shutting_out = actions.add_parser("revoke", help="stop accepting a viewer")
    shutting_out.add_argument("name", metavar="NAME", help="the name given to `allow`")
    shutting_out.set_defaults(action=_revoke)


def run(options: argparse.Namespace) -> int:
    try:
        sys.stdout.write(options.action(keys_dir(), options))
    except KeysError as error:
        raise UsageError(str(error)) from error
    return 0


def _new(directory: Path, options: argparse.Namespace) -> str:
    pair = make_pair(directory, options.name)
    key = pair.public.hex()
    if pair.name == DAEMON_KEY:
        hint = f"its viewers connect with:  cbtop --connect tcp://HOST:PORT --server-key {key}"
    else:
        hint = f"where the daemon runs, its owner lets you in with:  cbtop keys allow NAME {key}"
    return f"made {directory / pair.name}.key and .key_secret\npublic key: {key}\n{hint}\n"


def _list(directory: Path, options: argparse.Namespace) -> str:
    own = [(name, public.hex()) for name, public in pairs(directory).items()]
    let_in = sorted((name, public.hex()) for public, name in allowed(directory).items())
    if options.json:
        document = {
            "schema": "cbtop.keys/1",
            "directory": str(directory),
            "pairs": [{"name": name, "public_key": key} for name, key in own],
            "allowed": [{"name": name, "public_key": key} for name, key in let_in],
        }
        return json.dumps(document) + "\n"
    width = max((len(name) for name, _key in own + let_in), default=0)
    lines = [f"key pairs in {directory}"]
    lines += [f"  {name:<{width}}  {key}" for name, key in own] or ["  none; make one with: cbtop keys new NAME"]
    lines.append("viewers that the daemon of this machine lets in")
    lines += [f"  {name:<{width}}  {key}" for name, key in let_in] or ["  none; cbtop keys allow NAME PUBLIC_KEY"]
    return "\n".join(lines) + "\n"


def _allow(directory: Path, options: argparse.Namespace) -> str:
    allow(directory, options.name, parse_public_key(options.key))
    return f"{options.name} may listen\n"


def _revoke(directory: Path, options: argparse.Namespace) -> str:
    revoke(directory, options.name)
    return f"{options.name} may listen no more\n"
