//! Everything that stands still for an instant: applications, threads of RAID arrays, and file
//! systems.

use crate::{
    applications::Frozen,
    arrays::Arrays,
    disks::Still,
    mounts::Mounted,
    undo::UndoProcess,
    volumes::{self, Disks},
};
use mercury_control::{error::Result, sysroot::Sysroot};

/// Everything that is held still until this is dropped.
#[derive(Debug)]
pub struct Stillness {
    // In the order in which they go on.
    _file_systems: Still,
    _arrays: Arrays,
    applications: Frozen,
}

/// Parts of the machine that stand still.
#[derive(Clone, Copy, Debug)]
pub struct Extent<'a> {
    /// Processes that go on.
    pub needed: &'a [u32],
    /// File systems that are frozen.
    pub mounts: &'a [Mounted],
    /// True if disks must not change by themselves either: RAID arrays come to rest.
    pub arrays: bool,
    /// The disks of the next life, if volumes must not write to them by themselves either.
    pub volumes: Option<Disks>,
}

impl Stillness {
    /// Holds applications, then arrays, then file systems; the undo process releases them if this
    /// process does not.
    ///
    /// # Errors
    ///
    /// Returns an error that names what does not come to rest; everything goes on then.
    pub fn hold(extent: Extent<'_>, sysroot: &Sysroot, guard: &mut UndoProcess) -> Result<Self> {
        let applications = Frozen::hold(guard, extent.needed)?;
        // A volume may have come into use since the first question.
        extent.volumes.map_or(Ok(()), |disks| volumes::refuse_restless(disks, sysroot))?;
        let arrays = if extent.arrays { Arrays::hold(guard, sysroot)? } else { Arrays::default() };
        let file_systems = Still::hold(extent.mounts, guard)?;
        arrays.wait(sysroot)?;
        extent.volumes.map_or(Ok(()), |_| volumes::wait(sysroot))?;
        Ok(Self { _file_systems: file_systems, _arrays: arrays, applications })
    }

    /// Lets applications run again, and nothing else ([`Frozen::thaw`]).
    pub fn thaw_applications(&self, guard: &mut UndoProcess) {
        self.applications.thaw(guard);
    }
}
