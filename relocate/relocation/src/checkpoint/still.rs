//! Everything that stands still until the machine is off.

use mercury_control::device::Device;
use mercury_quiesce::{stillness::Stillness, swap, undo::UndoProcess};

/// Everything that stands still until the machine is off, with the undo process.
pub(super) struct Held {
    // The fence ends with the device.
    pub(super) _device: Device,
    pub(super) _still: Option<Stillness>,
    pub(super) _swap: Option<swap::Off>,
    pub(super) _guard: UndoProcess,
}
