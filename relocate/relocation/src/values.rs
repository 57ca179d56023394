//! Values of options: where an image goes, how often one is made, and where a destination listens.

use crate::host::{self, PORT};
use std::{
    fmt,
    net::{Ipv4Addr, SocketAddrV4},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

/// An interval between images: `90s`, `10m`, `6h`, `1d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Duration);

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "a number with s, m, h or d, such as 10m".to_owned();
        let unit = match text.chars().last() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86_400,
            _ => return Err(wrong()),
        };
        let number: u64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
        let seconds = number.checked_mul(unit).filter(|seconds| *seconds > 0).ok_or_else(wrong)?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

/// The target that the operator names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// `-`: standard output.
    Stdout,
    /// A file or a block device.
    Path(PathBuf),
    /// `ssh://[user@]host/path`: a file on another host.
    Remote {
        /// Host, as ssh takes it.
        host: String,
        /// Path on the host.
        path: String,
    },
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "-" {
            return Ok(Self::Stdout);
        }
        let Some(rest) = text.strip_prefix("ssh://") else { return Ok(Self::Path(text.into())) };
        match rest.split_once('/') {
            Some((host, path)) if !host.is_empty() && !host.starts_with('-') && !path.is_empty() => {
                Ok(Self::Remote { host: host.to_owned(), path: format!("/{path}") })
            }
            _ => Err("it has the form ssh://[user@]host/path".into()),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Remote { host, path } => write!(f, "ssh://{host}{path}"),
        }
    }
}

/// An IPv4 address to wait at, with a port or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub SocketAddrV4);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if let Some(literal) = host::literal(text) {
            // A mistake in an IPv6 address needs no message of its own here.
            let mapped = literal.ok().and_then(|(address, port)| Some((address.to_ipv4_mapped()?, port)));
            let Some((address, port)) = mapped else {
                return Err("the restore environment has IPv4 addresses only, such as 10.9.0.3".into());
            };
            return Ok(Self(SocketAddrV4::new(address, port.unwrap_or(PORT))));
        }
        let alone = || text.parse::<Ipv4Addr>().map(|address| SocketAddrV4::new(address, PORT));
        let found = text.parse().or_else(|_| alone());
        found.map(Self).map_err(|_| "such as 10.9.0.3 or 10.9.0.3:4747".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals() {
        assert_eq!("10m".parse(), Ok(Interval(Duration::from_secs(600))));
        assert_eq!("1d".parse(), Ok(Interval(Duration::from_secs(86_400))));
        for wrong in ["", "m", "10", "0s", "-1s", "99999999999999999999d"] {
            assert!(wrong.parse::<Interval>().is_err(), "{wrong}");
        }
    }
}
