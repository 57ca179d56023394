//! The interface of the loop of a move ([`super::mover`]) to the machine that moves. The loop does
//! not know if the machine is [`super::here::Here`], or a test's that reports anything that runs
//! when it should stand still.

use super::{doubt::Doubt, report::MoveEvent};
use mercury_control::{
    device::{Cursor, Device, Frames},
    error::Result,
};
use mercury_image::FileSystem;
use mercury_migration::protocol::Tombstone;
use std::{fs::File, net::SocketAddr, thread::JoinHandle};

/// The memory of the machine. One thread reads it while another one does the rest.
pub trait Memory: Sync {
    /// Reads current frames from a cursor on: up to `count`, among those that `only` names
    /// (`MERCURY_READ_*`).
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be read.
    fn scan(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames>;

    /// Reads frames as they were at the instant.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be read.
    fn read(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames>;

    /// Reads frames as they were at the instant, each with the hash that the hypervisor has made of
    /// it.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be read.
    fn read_hashed(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<(Frames, Vec<u64>)>;

    /// Begins the dirty log.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot begin.
    fn begin_log(&self) -> Result<()>;

    /// Collects the dirty log, whose frames the next calls read if they ask for those.
    ///
    /// # Errors
    ///
    /// Returns an error if the log may be incomplete.
    fn collect_log(&self) -> Result<()>;
}

impl Memory for Device {
    fn scan(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        self.snapshot_read_present_some(cursor, count, only)
    }

    fn read(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        self.snapshot_read_some(cursor, count, only)
    }

    fn read_hashed(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<(Frames, Vec<u64>)> {
        self.snapshot_read_hashed(cursor, count, only)
    }

    fn begin_log(&self) -> Result<()> {
        self.log_begin()
    }

    fn collect_log(&self) -> Result<()> {
        self.log_collect().map(drop)
    }
}

/// The machine that goes on after the instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The source.
    Source,
    /// The machine that has arrived.
    Arrived,
}

/// The machine that moves.
pub trait System {
    /// Returns true if Ctrl-C wants the move to stop.
    fn is_interrupted(&self) -> bool;

    /// Tells the undo process that this process is making progress.
    fn is_alive(&mut self);

    /// Reports an event on the command's output, if that can be written to now.
    fn tell(&mut self, told: &MoveEvent);

    /// Shows a line of progress, while everything runs.
    fn show(&self, line: &str);

    /// Starts to write file data back to disk, without waiting for the end.
    fn begin_sync(&mut self) -> JoinHandle<()>;

    /// Throttles applications: they stand still for this percentage of the time.
    ///
    /// # Errors
    ///
    /// Returns an error if they cannot be held.
    fn hold_back(&mut self, percent: u8) -> Result<()>;

    /// Fences the network off, except for the connection to `but`. From then on no path name is
    /// looked up: the root may be on a server, and cached names expire.
    ///
    /// # Errors
    ///
    /// Returns an error if the network cannot be fenced off.
    fn fence_off(&mut self, but: SocketAddr) -> Result<()>;

    /// Holds applications still, and freezes file systems.
    ///
    /// # Errors
    ///
    /// Returns an error if some cannot be held.
    fn hold_still(&mut self) -> Result<()>;

    /// Returns the file systems that the destination compares, with their fingerprints.
    fn file_systems(&mut self) -> Vec<FileSystem>;

    /// Takes the instant.
    ///
    /// # Errors
    ///
    /// Returns an error if it cannot be taken.
    fn take_instant(&mut self) -> Result<After>;

    /// Gives up the snapshot of the instant.
    ///
    /// # Errors
    ///
    /// Returns an error if frames that were read may not have been those of the instant.
    fn end_instant(&mut self) -> Result<()>;

    /// Commits: from here on only a process that knows the end of the move may let the machine go
    /// on, or let it be heard. This is the calling process, and if that is killed, the undo
    /// process, which gets this doubt and the tombstone.
    ///
    /// # Errors
    ///
    /// Returns an error if this cannot be made certain.
    fn commit(&mut self, doubt: Doubt, console: Option<File>) -> Result<()>;

    /// Writes a tombstone that survives a power cut, if there is a place for it.
    ///
    /// # Errors
    ///
    /// Returns the reason why it may be missing.
    fn tombstone(&mut self, tombstone: Tombstone) -> Result<(), String>;

    /// Lets everything go on as if nothing had been tried.
    fn go_on(&mut self);
}
