//! Options of a debugger: the socket or port where gdb connects.

use std::{path::PathBuf, str::FromStr};

/// The address at which gdb connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Path(PathBuf),
    /// A port of 127.0.0.1.
    Port(u16),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.strip_prefix(':').map(str::parse) {
            Some(Ok(port @ 1..)) => Ok(Self::Port(port)),
            Some(_) => Err("a port is a number from 1 to 65535".to_owned()),
            None if text.is_empty() => Err("there are SOCKET and :PORT".to_owned()),
            None => Ok(Self::Path(text.into())),
        }
    }
}

/// The option `--gdb`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdbOption {
    pub address: Address,
    /// True if the machine waits for gdb before its first instruction.
    pub waits: bool,
}

impl FromStr for GdbOption {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (address, waits) = text.strip_suffix(",wait").map_or((text, false), |address| (address, true));
        Ok(Self { address: address.parse()?, waits })
    }
}
