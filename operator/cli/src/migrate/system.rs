//! The machine that moves, as far as the loop of its move ([`super::mover`]) has to do with it. The loop does not know whether
//! it is [`super::here::Here`], or one of a test's that tells whether anything ran that should have stood still.

use super::{doubt::Doubt, report::Told};
use crate::{
    device::{Cursor, Device, Frames},
    error::Result,
};
use mercury_image::FileSystem;
use mercury_migration::protocol::Mark;
use std::{fs::File, net::SocketAddr, thread::JoinHandle};

/// Its memory. One thread reads it while another one looks after the rest.
pub trait Memory: Sync {
    /// Reads frames as they are now, from a place on: so many at most, and of those that `only` names (`MERCURY_TAKE_*`).
    ///
    /// # Errors
    /// If they cannot be read.
    fn look(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames>;

    /// Reads them as they were at the instant.
    ///
    /// # Errors
    /// If they cannot be read.
    fn take(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames>;

    /// The same, each with the hash that the hypervisor has made of it.
    ///
    /// # Errors
    /// If they cannot be read.
    fn take_hashed(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<(Frames, Vec<u64>)>;

    /// What is written to is noted from here on.
    ///
    /// # Errors
    /// If it cannot be.
    fn begin_log(&self) -> Result<()>;

    /// What was noted is what is looked at or taken next, if that is asked for.
    ///
    /// # Errors
    /// If something may be missing in it.
    fn collect_log(&self) -> Result<()>;
}

impl Memory for Device {
    fn look(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        self.snapshot_look_some(cursor, count, only)
    }

    fn take(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<Frames> {
        self.snapshot_take_some(cursor, count, only)
    }

    fn take_hashed(&self, cursor: &mut Cursor, count: usize, only: u64) -> Result<(Frames, Vec<u64>)> {
        self.snapshot_take_hashed(cursor, count, only)
    }

    fn begin_log(&self) -> Result<()> {
        self.log_begin()
    }

    fn collect_log(&self) -> Result<()> {
        self.log_collect().map(drop)
    }
}

/// Which machine goes on behind the instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The one that moves.
    Source,
    /// The one that has arrived.
    Arrived,
}

/// The machine that moves.
pub trait System {
    /// Whether somebody wants it stopped: Ctrl-C.
    fn is_interrupted(&self) -> bool;

    /// This process gets on: whoever sets the machine going when it does not, hears so.
    fn is_alive(&mut self);

    /// Tells whoever reads what the command prints, if that can be done now.
    fn tell(&mut self, told: &Told);

    /// Shows a line of progress, while everything runs.
    fn show(&self, line: &str);

    /// Has what was written to files brought to their disks, without waiting for it.
    fn begin_sync(&mut self) -> JoinHandle<()>;

    /// Applications run for a part of the time only: they stand still for so many percent of it.
    ///
    /// # Errors
    /// If they cannot be held.
    fn hold_back(&mut self, percent: u8) -> Result<()>;

    /// No packet passes but those of the connection to there. No name in a file system is looked up from then on: the root
    /// may be a server's, and its names are asked for again after a while.
    ///
    /// # Errors
    /// If that cannot be.
    fn fence_off(&mut self, but: SocketAddr) -> Result<()>;

    /// Applications stand still, and file systems are quiet.
    ///
    /// # Errors
    /// If they do not.
    fn hold_still(&mut self) -> Result<()>;

    /// The file systems that the other end compares, with their marks.
    fn file_systems(&mut self) -> Vec<FileSystem>;

    /// Takes the instant.
    ///
    /// # Errors
    /// If it cannot be taken.
    fn take_instant(&mut self) -> Result<After>;

    /// Memory as it was at the instant is not needed any more.
    ///
    /// # Errors
    /// If what was read of it may not have been that.
    fn end_instant(&mut self) -> Result<()>;

    /// From here on nobody may set the machine going, nor let it be heard, who does not know how the move has ended: this process,
    /// and if it is killed, whoever has this doubt, with what there is of a mark.
    ///
    /// # Errors
    /// If that cannot be made certain.
    fn commit(&mut self, doubt: Doubt, console: Option<File>) -> Result<()>;

    /// Has a mark written that outlasts a power cut, where there is a place for it.
    ///
    /// # Errors
    /// Why it may not be there.
    fn mark(&mut self, mark: Mark) -> Result<(), String>;

    /// Everything goes on as if nothing had been tried.
    fn go_on(&mut self);
}
