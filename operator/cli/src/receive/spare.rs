//! The spare: what a move's destination ([`super::serve`]) needs of the machine that it runs on. Its loop does not know
//! whether it is [`Here`], or one of a test's that tells whether anything of a liar's was started.

use super::{disks::Targets, room};
use crate::{
    checkpoint::describe,
    device::{Access, Device},
    error::{Error, Result},
    ethernet::{self, Card, packets::Packets},
    migrate::{
        disk::Disk,
        offer::{Offer, OfferedDisk},
    },
    restore::{fit, restart},
    sysroot::Sysroot,
};
use mercury_abi::{
    code::Code,
    restart::{LoadEntry, MERCURY_RESTART_AGAIN},
};
use mercury_image::FileSystem;
use mercury_migration::{hail::ETHER_TYPE, protocol::Attempt, wire::Chunks};
use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

/// How long disks besides those of the small system may take to appear.
const DISKS_PATIENCE: Duration = Duration::from_secs(10);

/// The memory of a machine that comes. Several threads put pages there.
pub trait Memory: Send + Sync {
    /// Puts pages where they belong; `data` has those that are not zeros.
    ///
    /// # Errors
    /// If there is no room, or they belong nowhere.
    fn load(&self, entries: &[LoadEntry], data: &[u8]) -> Result<()>;

    /// What lies where these pages were put.
    ///
    /// # Errors
    /// If nothing does.
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

/// A machine that takes another one in.
pub trait Spare {
    /// Whether what is offered can be held; memory is ready for it then.
    ///
    /// # Errors
    /// Every reason why not.
    fn prepare(&mut self, offer: &Offer) -> Result<(), String>;

    /// Where what comes is put. Whoever has it lets go of it before what has come is forgotten.
    fn memory(&self) -> Arc<dyn Memory>;

    /// Writes chunks of disks to where they belong.
    ///
    /// # Errors
    /// If they belong nowhere, or cannot be written.
    fn write_disk(&mut self, chunks: &Chunks) -> Result<()>;

    /// Whether all disks that were offered are what was sent.
    ///
    /// # Errors
    /// Why not.
    fn complete_disks(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> Result<(), String>;

    /// Goes on in what has arrived. Returns only if that cannot be: why.
    fn go(&mut self) -> Error;

    /// Forgets what has come.
    ///
    /// # Errors
    /// If nothing can come after it.
    fn release(&mut self) -> Result<()>;

    /// Of these file systems those that are not as they were at the instant, and why.
    fn changed_disks(&self, file_systems: &[FileSystem]) -> Vec<String>;

    /// Its cards, which what arrives finds.
    fn cards(&self) -> Vec<Card>;

    /// Says a frame to all.
    fn hail(&self, frame: &[u8]);

    /// A frame that somebody has said to all.
    fn hear(&self) -> Option<Vec<u8>>;

    /// What can be read when there is one, if they can be heard at all.
    fn ear(&self) -> Option<BorrowedFd<'_>>;
}

/// This machine.
#[derive(Debug)]
pub struct Here {
    card: Option<Card>,
    packets: Option<Packets>,
    device: Arc<Device>,
    disks: Targets,
}

impl Here {
    /// With the card that a machine comes in by, and the disks that it may overwrite.
    ///
    /// # Errors
    /// If the driver is not there.
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
            reasons.push(format!("{online} CPUs are online, {} in the machine that comes", offer.cpus));
        }
        let shared = offer.shared_file_systems();
        fit::wait_for_disks(&shared, DISKS_PATIENCE);
        reasons.extend(fit::missing_disks(&shared));
        reasons.extend(self.disks.prepare(&offer.disks, &sysroot).err().into_iter().flatten());
        reasons.extend(room::lacking(offer, &sysroot));
        let mut restart = restart(&offer.machine);
        restart.flags |= MERCURY_RESTART_AGAIN;
        // What the driver finds is worth knowing together with the rest.
        if let Err(error) = self.device.restore_begin(&restart) {
            let more = match error.code {
                Some(Code::RestoreRoom) => {
                    "; `mercury migrate --pool` with more than this small kernel's memory makes room"
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

    fn complete_disks(&mut self, offered: &[OfferedDisk], attempt: Attempt) -> Result<(), String> {
        self.disks.complete(offered, attempt)
    }

    fn go(&mut self) -> Error {
        let why = "the machine that has come could not be started";
        self.device.restore_go().err().unwrap_or_else(|| Error::fault(why))
    }

    fn release(&mut self) -> Result<()> {
        self.disks.release();
        // The driver lets go of it with the device. One process controls it at a time.
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

    fn hail(&self, frame: &[u8]) {
        if let (Some(packets), Some(card)) = (&self.packets, &self.card) {
            // There may be a connection besides.
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
