//! The readiness of a machine for another life as a guest, where its own devices are gone and virtio devices
//! come, and for the way back. What they need cannot be read then: a root on the network comes back with the
//! card.

use crate::{
    describe,
    ethernet::{
        self,
        takeover::{self, Configuration},
    },
    metal::{Metal, Rescan},
    patient::{self, PROGRAM_PATIENCE},
};
pub use mercury_control::monitor::{is_guest, ports};
use mercury_control::sysroot::Sysroot;
use rustix::fs::OFlags;
use std::{ffi::CString, io, process::Command};

/// Drivers of the devices that come, with their folders in /sys/bus.
const DRIVERS: [(&str, &str); 4] = [
    ("virtio_mmio", "platform/drivers/virtio-mmio"),
    ("virtio_blk", "virtio/drivers/virtio_blk"),
    ("virtio_net", "virtio/drivers/virtio_net"),
    ("virtio_rng", "virtio/drivers/virtio_rng"),
];

/// The drivers and what they need. Other drivers that have come meanwhile are for other devices.
const TAKEN_OUT: [&str; 8] = [
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "net_failover",
    "failover",
    "virtio_ring",
    "virtio",
];

/// Drivers and facts for a life as a guest. Its end takes the drivers out again that were not there before.
#[derive(Debug)]
pub struct Readiness {
    network: io::Result<Configuration>,
    /// The hardware, which a guest remembers.
    metal: Metal,
    /// In a guest: its way to find the hardware again.
    rescan: Option<Rescan>,
    /// Modules, the newest first, as the kernel lists them.
    loaded: Vec<String>,
    /// Drivers that the kernel does not have.
    missing: Vec<String>,
}

impl Readiness {
    /// Loads the drivers, and keeps the configuration of the network. A machine without the drivers goes on
    /// only on equal hardware, or without the devices.
    #[must_use]
    pub fn prepare(sysroot: &Sysroot) -> Self {
        let before = names(sysroot);
        let mut modprobe = Command::new("modprobe");
        modprobe.args(["-q", "-a"]).args(DRIVERS.map(|(name, _)| name));
        // A driver may be built in, or missing.
        let _ = patient::output(modprobe, PROGRAM_PATIENCE);
        let is_new = |name: &String| !before.contains(name) && TAKEN_OUT.contains(&name.as_str());
        let loaded = names(sysroot).into_iter().filter(is_new).collect();
        let here = || Metal { devices: describe::devices(sysroot), cards: ethernet::cards(sysroot) };
        let metal = recalled(sysroot).unwrap_or_else(here);
        let rescan = is_guest().then(|| Rescan::prepare(sysroot));
        let missing = missing(sysroot);
        Self { network: takeover::keep(sysroot), metal, rescan, loaded, missing }
    }

    /// Returns the drivers that the kernel does not have.
    #[must_use]
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// In the machine that has arrived, before its applications go on: lets the cards that came take over the
    /// network. They are the monitor's in a guest, and the machine's own again after a life as a guest.
    /// Returns `None` if the machine has gone from metal to metal, and otherwise what did not succeed.
    pub fn arrive(&mut self) -> Option<Vec<String>> {
        let is_guest = is_guest();
        let found = match &mut self.rescan {
            _ if is_guest => None,
            Some(rescan) => failure(rescan.find(&self.metal)),
            None => return None,
        };
        if is_guest {
            self.stay();
        }
        Some(found.into_iter().chain(self.take_over()).collect())
    }

    /// After the arrival, when a server of the root answers again: a guest remembers its hardware, and a
    /// machine on its hardware forgets it. Returns what did not succeed.
    pub fn note(&self, sysroot: &Sysroot) -> Option<String> {
        if is_guest() {
            return failure(self.metal.remember(sysroot));
        }
        self.rescan.as_ref().and_then(|_| failure(Metal::forget(sysroot)))
    }

    fn take_over(&self) -> Vec<String> {
        match (&self.network, takeover::links()) {
            (Ok(network), Ok(cards)) => network.take_over(&self.metal.cards, &cards),
            (Err(error), _) => vec![format!("the network has no configuration: {error}")],
            (_, Err(error)) => vec![format!("the network cards are unknown: {error}")],
        }
    }

    /// Lets the drivers stay: devices need them, or the machine ends.
    pub fn stay(&mut self) {
        self.loaded.clear();
    }
}

impl Drop for Readiness {
    fn drop(&mut self) {
        for name in self.loaded.iter().filter_map(|name| CString::new(name.as_str()).ok()) {
            // A driver that a process has begun to use stays.
            let _ = rustix::system::delete_module(&name, OFlags::NONBLOCK.bits().cast_signed());
        }
    }
}

/// Returns the hardware that a guest remembers. A machine on its hardware has nothing to remember.
#[must_use]
pub fn recalled(sysroot: &Sysroot) -> Option<Metal> {
    is_guest().then(|| Metal::recall(sysroot))?
}

fn failure(result: io::Result<()>) -> Option<String> {
    result.err().map(|error| format!("its hardware: {error}"))
}

/// Returns the drivers that are neither loaded nor built in.
fn missing(sysroot: &Sysroot) -> Vec<String> {
    let is_missing = |(_, folder): &(&str, &str)| !sysroot.exists(&format!("sys/bus/{folder}"));
    DRIVERS.into_iter().filter(is_missing).map(|(name, _)| name.to_owned()).collect()
}

fn names(sysroot: &Sysroot) -> Vec<String> {
    sysroot.modules().into_iter().map(|module| module.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_not_there_is_missing_and_one_that_is_built_in_is_not() {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        assert_eq!(missing(&sysroot), ["virtio_mmio", "virtio_blk", "virtio_net", "virtio_rng"]);
        for folder in ["platform/drivers/virtio-mmio", "virtio/drivers/virtio_net"] {
            std::fs::create_dir_all(root.path().join("sys/bus").join(folder)).expect("a folder");
        }
        assert_eq!(missing(&sysroot), ["virtio_blk", "virtio_rng"]);
    }
}
