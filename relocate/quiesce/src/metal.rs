//! The hardware that a machine had before it went on as a guest. The machine remembers it in memory, so that
//! the way back is checked against it, and so that each network card gets its own configuration again.

use crate::ethernet::{Card, takeover};
use mercury_control::sysroot::Sysroot;
use mercury_image::Device;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

/// File in memory with the hardware. It is gone after a reboot, when the machine's kernel knows only what is
/// there.
const FILE: &str = "run/mercury/metal.json";
/// File by which the kernel looks for PCI devices.
const RESCAN: &str = "sys/bus/pci/rescan";
/// Time for a network card to appear after the kernel has looked, and the interval between two looks.
const APPEARS: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The hardware of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metal {
    /// PCI devices.
    pub devices: Vec<Device>,
    /// Network cards.
    pub cards: Vec<Card>,
}

impl Metal {
    /// Returns the hardware that this machine remembers, if it is a guest.
    #[must_use]
    pub fn recall(sysroot: &Sysroot) -> Option<Self> {
        serde_json::from_slice(&fs::read(sysroot.path(FILE)).ok()?).ok()
    }

    /// Remembers this hardware from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be written.
    pub fn remember(&self, sysroot: &Sysroot) -> io::Result<()> {
        let path = sysroot.path(FILE);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, serde_json::to_vec(self)?)
    }

    /// Forgets the hardware: the machine has it again.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be removed.
    pub fn forget(sysroot: &Sysroot) -> io::Result<()> {
        match fs::remove_file(sysroot.path(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Returns the devices that are not among these.
    #[must_use]
    pub fn absent(self, present: &[Device]) -> Vec<Device> {
        let is_absent = |device: &Device| !present.iter().any(|one| one.address == device.address);
        self.devices.into_iter().filter(is_absent).collect()
    }
}

/// The kernel's look for PCI devices. No path is looked up for it: the root may lie behind a card that has
/// yet to be found.
#[derive(Debug)]
pub struct Rescan(io::Result<File>);

impl Rescan {
    /// Prepares for a look.
    #[must_use]
    pub fn prepare(sysroot: &Sysroot) -> Self {
        Self(File::options().write(true).open(sysroot.path(RESCAN)))
    }

    /// Makes the kernel look for its devices, and waits for the network cards that were up.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel does not look.
    pub fn find(&mut self, metal: &Metal) -> io::Result<()> {
        match &mut self.0 {
            Ok(file) => file.write_all(b"1")?,
            Err(error) => return Err(error.kind().into()),
        }
        let end = Instant::now() + APPEARS;
        while Instant::now() < end {
            let now = takeover::links()?;
            let is_there = |card: &Card| now.iter().any(|one| one.place == card.place);
            if metal.cards.iter().filter(|card| card.up).all(is_there) {
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_remembers_its_hardware_until_it_has_it_again() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        assert_eq!(Metal::recall(&sysroot), None);
        let device = |address: &str| Device { address: address.into(), ..Device::default() };
        let card = Card { name: "eth0".into(), place: "0000:00:02.0 0".into(), ..Card::default() };
        let metal =
            Metal { devices: vec![device("0000:00:01.0"), device("0000:00:02.0")], cards: vec![card] };
        metal.remember(&sysroot).expect("written");
        let recalled = Metal::recall(&sysroot).expect("remembered");
        assert_eq!(recalled, metal);
        assert_eq!(recalled.absent(&[device("0000:00:01.0")]), [device("0000:00:02.0")]);
        Metal::forget(&sysroot).expect("removed");
        Metal::forget(&sysroot).expect("nothing to remove");
        assert_eq!(Metal::recall(&sysroot), None);
    }

    #[test]
    fn the_kernel_looks_though_no_path_can_be_looked_up() {
        let root = tempfile::tempdir().expect("a folder");
        let file = root.path().join(RESCAN);
        fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        fs::write(&file, "").expect("written");
        let mut rescan = Rescan::prepare(&Sysroot::at(root.path()));
        let elsewhere = root.path().join("elsewhere");
        fs::rename(&file, &elsewhere).expect("renamed");
        rescan.find(&Metal::default()).expect("a look");
        assert_eq!(fs::read(elsewhere).expect("read"), b"1");
        assert!(Rescan::prepare(&Sysroot::at(root.path())).find(&Metal::default()).is_err());
    }
}
