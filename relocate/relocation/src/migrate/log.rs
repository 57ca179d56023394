//! The source of changed frames: the driver's dirty log, if there can be one. A move and
//! `--dry-run` use it alike.

use super::system::Memory;
use mercury_abi::ioctl::{MERCURY_READ_LOGGED, MERCURY_SNAPSHOT_TRACK};
use mercury_control::{device::Device, error::Result};

/// The way to find frames that have changed since they were sent: hashes of all memory, or a dirty
/// log.
#[derive(Debug)]
pub enum Log {
    /// No dirty log, for this reason.
    None(String),
    /// Room for a dirty log is reserved.
    Prepared,
    /// The dirty log is on, and has all writes since the first frame was read.
    Live,
}

impl Log {
    /// Describes the source of changed frames.
    pub fn found_by(&self) -> String {
        match self {
            Self::None(why) => format!("hashes of all memory: {why}"),
            Self::Prepared => "reading all of memory: nothing was sent before".into(),
            Self::Live => "a dirty log".into(),
        }
    }

    /// Begins the dirty log before the first frame is read. If that fails, hashes are used.
    pub fn begin(&mut self, memory: &dyn Memory) {
        if matches!(self, Self::Prepared) {
            *self = match memory.begin_log() {
                Ok(()) => Self::Live,
                Err(why) => Self::None(why.to_string()),
            };
        }
    }

    /// Returns the frames that have to be read next: `MERCURY_READ_*`.
    pub fn collect(&mut self, memory: &dyn Memory) -> u64 {
        if !matches!(self, Self::Live) {
            return 0;
        }
        match memory.collect_log() {
            Ok(()) => MERCURY_READ_LOGGED,
            Err(why) => {
                *self = Self::None(why.to_string());
                0
            }
        }
    }
}

/// Prepares a snapshot with `flags`, and with room for a dirty log if there can be one.
///
/// # Errors
///
/// Returns an error if the snapshot cannot be prepared.
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
    Ok(Log::None("the option --hash asks for them".into()))
}
