//! What tells which frames may have changed since they were sent: the driver's log of writes, where there can be one. A move
//! and `--dry-run` go by it alike.

use super::system::Memory;
use crate::{device::Device, error::Result};
use mercury_abi::ioctl::{MERCURY_SNAPSHOT_TRACK, MERCURY_TAKE_LOGGED};

/// What has changed since it was sent is told by hashes of all memory, or by a log of what may have.
#[derive(Debug)]
pub enum Log {
    /// There is none, for this reason.
    None(String),
    /// There is room for one.
    Prepared,
    /// All that is written since the first frame was read is in it.
    Live,
}

impl Log {
    /// What is said of it.
    pub fn found_by(&self) -> String {
        match self {
            Self::None(why) => format!("hashes of all memory: {why}"),
            Self::Prepared => "reading all of memory: nothing was sent before".into(),
            Self::Live => "a log of writes".into(),
        }
    }

    /// Before the first frame is read. Where there is no log, hashes do it.
    pub fn begin(&mut self, memory: &dyn Memory) {
        if matches!(self, Self::Prepared) {
            *self = match memory.begin_log() {
                Ok(()) => Self::Live,
                Err(why) => Self::None(why.to_string()),
            };
        }
    }

    /// Which frames have to be read next: `MERCURY_TAKE_*`.
    pub fn collect(&mut self, memory: &dyn Memory) -> u64 {
        if !matches!(self, Self::Live) {
            return 0;
        }
        match memory.collect_log() {
            Ok(()) => MERCURY_TAKE_LOGGED,
            Err(why) => {
                *self = Self::None(why.to_string());
                0
            }
        }
    }
}

/// Makes the snapshot ready, with room for a log if there can be one, and `flags` besides.
///
/// # Errors
/// If it cannot be made.
pub fn prepare(device: &Device, pool: u64, hash_all: bool, flags: u64) -> Result<Log> {
    if !hash_all {
        match device.snapshot_prepare(pool, MERCURY_SNAPSHOT_TRACK | flags) {
            Ok(()) => return Ok(Log::Prepared),
            Err(why) => {
                device.snapshot_prepare(pool, flags)?;
                return Ok(Log::None(why.to_string()));
            }
        }
    }
    device.snapshot_prepare(pool, flags)?;
    Ok(Log::None("it was wanted so".into()))
}
