//! The machine of a destination: the interface that the loop of [`super::serve`] needs. The loop
//! does not know if the machine is [`Here`], or a test's that reports any start of a lying source's
//! machine.

use super::{disks::Targets, room};
use crate::{
    migrate::{
        disk::Disk,
        offer::{Offer, OfferedDisk},
    },
    restore::{fit, restart},
};
use mercury_abi::{
    code::Code,
    restart::{LoadEntry, MERCURY_RESTART_AGAIN},
};
use mercury_control::{
    device::{Access, Device},
    error::{Error, Result},
    sysroot::Sysroot,
};
use mercury_image::{FileSystem, Machine};
use mercury_migration::{announcement::ETHER_TYPE, protocol::Attempt, wire::Chunks};
use mercury_quiesce::{
    describe,
    ethernet::{self, Card, packets::Packets},
};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

/// Time for disks besides those of the restore environment to appear.
const DISKS_PATIENCE: Duration = Duration::from_secs(10);

/// The memory of an arriving machine. Several threads load pages into it.
pub trait Memory: Send + Sync {
    /// Loads pages to their addresses; `data` has those that are not zeros.
    ///
    /// # Errors
    ///
    /// Returns an error if there is no room, or an address is wrong.
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()>;

    /// Reads back the pages that were loaded to these addresses.
    ///
    /// # Errors
    ///
    /// Returns an error if none were.
    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>>;
}

impl Memory for Device {
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()> {
        self.restore_load(entries, data)
    }

    fn read_back(&self, entries: &[LoadEntry]) -> Result<Vec<u8>> {
        self.restore_read(entries)
    }
}

/// The progress of a machine that was started beside this system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Its instructions may run, and its kernel has given no sign yet.
    Starting,
    /// Its kernel has gone on.
    Running,
    /// It was started, and does not run any more.
    Ended,
}

/// A machine that can receive another one. A thread of its own completes the disks.
pub trait Spare: Send {
    /// Prepares memory and disks for the offered machine.
    ///
    /// # Errors
    ///
    /// Returns every reason why it does not fit.
    fn prepare(&mut self, offer: &Offer) -> Result<(), String>;

    /// Returns the memory for the machine. The caller must drop it before `release`.
    fn memory(&self) -> Arc<dyn Memory>;

    /// Writes chunks of disks.
    ///
    /// # Errors
    ///
    /// Returns an error if their disk was not offered, or cannot be written.
    fn write_disk(&mut self, chunks: &Chunks) -> Result<()>;

    /// Begins to make what was written to disks last, without waiting for the end. Little is left to wait for
    /// when applications stand still.
    fn begin_sync(&mut self) {}

    /// Checks if all offered disks hold the data that was sent, and completes them.
    ///
    /// # Errors
    ///
    /// Returns the reason if they do not.
    fn complete_disks(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> Result<(), String>;

    /// Notes that the machine is complete, before its source is told. From then on its source may be lost,
    /// and the copy here be the only one.
    fn note_complete(&mut self) {}

    /// Returns true if the operator has ended the wait: no machine is to arrive any more.
    fn is_over(&self) -> bool {
        false
    }

    /// Takes the description of the machine at its instant. The machine is the offered one.
    fn describe(&mut self, _: &Machine) {}

    /// Goes on in the machine that has arrived. Returns only if that fails, or if this system goes on beside
    /// it.
    ///
    /// # Errors
    ///
    /// Returns the reason why none of its instructions has run.
    fn go(&mut self) -> Result<()>;

    /// Returns the word of these that the operator has said in another way than at the console.
    fn word(&mut self, _: &[&'static str]) -> Option<&'static str> {
        None
    }

    /// Returns the progress of a machine that was started beside this system.
    fn progress(&self) -> Progress {
        Progress::Starting
    }

    /// Returns the wait in which a machine is that was started beside this system, and advice to the
    /// operator.
    fn stage(&self) -> String {
        "nothing is known of its progress".into()
    }

    /// Discards the machine.
    ///
    /// # Errors
    ///
    /// Returns an error if no other machine can be received after it.
    fn release(&mut self) -> Result<()>;

    /// Returns those of these file systems that differ from their fingerprints of the instant, with
    /// reasons.
    fn changed_disks(&self, file_systems: &[FileSystem]) -> Vec<String>;

    /// Returns the cards of this machine, which the arriving machine will find.
    fn cards(&self) -> Vec<Card>;

    /// Announces a frame to all.
    fn announce(&self, frame: &[u8]);

    /// Returns an announcement of another machine.
    fn hear(&self) -> Option<Vec<u8>>;

    /// Returns a descriptor that is readable when there is an announcement, if they can be heard at
    /// all.
    fn ear(&self) -> Option<BorrowedFd<'_>>;
}

/// The real destination, on this machine.
#[derive(Debug)]
pub struct Here {
    card: Option<Card>,
    packets: Option<Packets>,
    device: Arc<Device>,
    disks: Targets,
}

impl Here {
    /// Opens the driver and the card that a machine arrives by, with the disks that it may
    /// overwrite.
    ///
    /// # Errors
    ///
    /// Returns an error if the driver is not there.
    pub fn open(card: Option<Card>, disks: Vec<Disk>) -> Result<Self> {
        Ok(Self {
            card,
            packets: Packets::open(ETHER_TYPE).ok(),
            device: Arc::new(Device::open(Access::Control)?),
            disks: Targets::new(disks),
        })
    }
}

impl Spare for Here {
    fn prepare(&mut self, offer: &Offer) -> Result<(), String> {
        let sysroot = Sysroot::default();
        let mut reasons = fit::differences(&offer.machine, &describe::describe(&sysroot));
        let online = sysroot.online_cpus().iter().count();
        if online != offer.cpus {
            reasons.push(format!("{online} CPUs are online, {} in the machine that arrives", offer.cpus));
        }
        let shared = offer.shared_file_systems();
        fit::wait_for_disks(&shared, DISKS_PATIENCE);
        reasons.extend(fit::missing_disks(&shared));
        reasons.extend(self.disks.prepare(&offer.disks, &sysroot).err().into_iter().flatten());
        reasons.extend(room::lacking(offer, &sysroot));
        let mut restart = restart(&offer.machine);
        restart.flags |= MERCURY_RESTART_AGAIN;
        // The driver's reasons are reported together with the others.
        if let Err(error) = self.device.restore_begin(&restart) {
            let more = match error.code {
                Some(Code::RestoreRoom) => {
                    "; `mercury migrate --pool` with more than this restore environment's memory makes room"
                }
                _ => "",
            };
            reasons.push(error.message + more);
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons.join("; ")) }
    }

    fn memory(&self) -> Arc<dyn Memory> {
        Arc::<Device>::clone(&self.device)
    }

    fn write_disk(&mut self, chunks: &Chunks) -> Result<()> {
        self.disks.write(chunks)
    }

    fn begin_sync(&mut self) {
        self.disks.begin_sync();
    }

    fn complete_disks(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> Result<(), String> {
        self.disks.complete(offered, attempt)
    }

    fn go(&mut self) -> Result<()> {
        self.device.restore_go()?;
        Err(Error::fault("the machine that has arrived could not be started"))
    }

    fn release(&mut self) -> Result<()> {
        self.disks.release();
        // Closing the device makes the driver discard the pages. Only one process controls the
        // driver at a time, so the old device is closed first.
        let observer = Arc::new(Device::open(Access::Observe)?);
        drop(std::mem::replace(&mut self.device, observer));
        self.device = Arc::new(Device::open(Access::Control)?);
        Ok(())
    }

    fn changed_disks(&self, file_systems: &[FileSystem]) -> Vec<String> {
        fit::changed_disks(file_systems)
    }

    fn cards(&self) -> Vec<Card> {
        ethernet::cards(&Sysroot::default())
    }

    fn announce(&self, frame: &[u8]) {
        if let (Some(packets), Some(card)) = (&self.packets, &self.card) {
            // If the announcement fails, a connection may still carry the word.
            let _ = packets.say(card, frame);
        }
    }

    fn hear(&self) -> Option<Vec<u8>> {
        self.packets.as_ref()?.hear()
    }

    fn ear(&self) -> Option<BorrowedFd<'_>> {
        self.packets.as_ref().map(AsFd::as_fd)
    }
}
