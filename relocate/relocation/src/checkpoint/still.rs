//! Everything that stands still for the instant, and until the machine is off.

use super::target::Target;
use crate::options::CheckpointOptions;
use mercury_control::{device::Device, error::Result, sysroot::Sysroot};
use mercury_quiesce::{applications::Frozen, arrays::Arrays, disks::Still, mounts, swap, undo::UndoProcess};

/// Everything that is held still for an instant, in the order in which it goes on.
pub(super) struct Stillness {
    _file_systems: Still,
    _arrays: Arrays,
    _applications: Frozen,
}

impl Stillness {
    /// Holds applications, file systems, and the threads of RAID arrays if disks must stay
    /// unchanged.
    pub(super) fn hold(
        args: &CheckpointOptions,
        mounts: &[mounts::Mounted],
        target: &Target,
        sysroot: &Sysroot,
        guard: &mut UndoProcess,
    ) -> Result<Self> {
        let applications = Frozen::hold(guard, &target.processes())?;
        let stays = args.poweroff || args.hook.is_some();
        let arrays = if stays { Arrays::hold(guard, sysroot)? } else { Arrays::default() };
        let file_systems = Still::hold(mounts, guard)?;
        arrays.wait(sysroot)?;
        Ok(Self { _file_systems: file_systems, _arrays: arrays, _applications: applications })
    }
}

/// Everything that stands still until the machine is off, with the undo process.
pub(super) struct Held {
    // The fence ends with the device.
    pub(super) _device: Device,
    pub(super) _still: Option<Stillness>,
    pub(super) _swap: Option<swap::Off>,
    pub(super) _guard: UndoProcess,
}
