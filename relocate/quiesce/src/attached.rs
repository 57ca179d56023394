//! The hypervisor, attached for the length of one command.

use crate::undo::{Undo, UndoProcess};
use mercury_abi::ioctl::MERCURY_STATE_ATTACHED;
use mercury_control::{
    access,
    device::Device,
    driver::{Direction, Driver},
    error::{Error, Result},
    exit::Exit,
    switch,
};

/// The hypervisor beneath the machine, taken out again if it was not there before.
pub struct Attached<'a> {
    device: &'a Device,
    undo: bool,
}

impl<'a> Attached<'a> {
    /// Attaches the hypervisor for a move. In a guest whose monitor stands in for it there is none.
    pub fn for_move(device: &'a Device, guard: &mut UndoProcess) -> Result<Self> {
        if access::is_monitored(device)? {
            return Ok(Self { device, undo: false });
        }
        Self::make(device, guard)
    }

    pub fn make(device: &'a Device, guard: &mut UndoProcess) -> Result<Self> {
        let undo = device.system()?.state != MERCURY_STATE_ATTACHED;
        if undo {
            guard.will(&Undo::Detach).map_err(|error| {
                Error::new(Exit::Failed, format!("the undo process is gone: {error}"))
                    .hint("`dmesg` may say more")
            })?;
        }
        switch::switch(device, Direction::Attach, None, switch::Prepared::default())?;
        Ok(Self { device, undo })
    }

    /// Keeps the hypervisor, or notes that there is none any more.
    pub fn forget(mut self) {
        self.undo = false;
    }

    /// Takes the hypervisor out.
    pub fn undo(mut self) -> Result<()> {
        let undo = std::mem::take(&mut self.undo);
        if undo {
            switch::switch(self.device, Direction::Detach, None, switch::Prepared::default())?;
        }
        Ok(())
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        if self.undo {
            // If this fails, the undo process takes the hypervisor out.
            let _ = switch::switch(self.device, Direction::Detach, None, switch::Prepared::default());
        }
    }
}
