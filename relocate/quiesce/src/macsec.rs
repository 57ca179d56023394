//! Network devices that encrypt with MACsec, in all network namespaces.
//!
//! A machine with one has no second life: the numbers of its packets would run twice. The driver refuses it
//! (`switch/driver/snapshot/nonces.c`), and here that refusal is predicted. The constants are those of
//! `include/uapi/linux/if_link.h` and of rtnetlink(7).

use super::{
    netlink::{Socket, attributes, text},
    stale,
};
use mercury_abi::code::Code;
use mercury_control::{
    error::{Error, Result},
    sysroot::Sysroot,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::{fs::File, os::fd::AsFd, thread};

/// Length of `struct ifinfomsg`, which precedes the attributes.
const INFO: usize = 16;
const GET_LINK: u16 = 18;
const NAME: u16 = 3;
const LINK_INFO: u16 = 18;
const KIND: u16 = 1;

/// Refuses a machine with such a device.
///
/// # Errors
///
/// Returns an error that names the devices.
pub fn refuse(sysroot: &Sysroot) -> Result<()> {
    refuse_devices(stale::namespaces(sysroot).iter().flat_map(devices_in).collect())
}

fn refuse_devices(devices: Vec<String>) -> Result<()> {
    if devices.is_empty() {
        return Ok(());
    }
    let text = format!("these network devices encrypt with MACsec: {}", devices.join(", "));
    Err(Error::coded(Code::MacsecInUse, text))
}

/// Returns the names of such devices in a network namespace. The driver finds those in a namespace that
/// cannot be entered.
fn devices_in(namespace: &File) -> Vec<String> {
    thread::scope(|scope| {
        // A thread of its own enters the namespace, and the others stay in theirs.
        let looks = scope.spawn(|| {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).ok()?;
            let links = Socket::open(libc::NETLINK_ROUTE).ok()?.dump(GET_LINK, &[0; INFO]).ok()?;
            Some(links.iter().filter_map(|link| macsec_of(link)).collect())
        });
        looks.join().ok().flatten().unwrap_or_default()
    })
}

/// Returns the name of a device of MACsec, from the kernel's message about it.
fn macsec_of(link: &[u8]) -> Option<String> {
    let find = |bytes: &'_ [u8], wanted: u16| -> Option<Vec<u8>> {
        attributes(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value.to_vec())
    };
    let all = link.get(INFO..)?;
    let kind = find(&find(all, LINK_INFO)?, KIND)?;
    (text(&kind) == "macsec").then(|| find(all, NAME).map(|name| text(&name)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::{super::netlink::tests::attribute, *};

    #[test]
    fn devices_of_macsec_are_named() {
        let link = |name: &[u8], kind: &[u8]| {
            let info = attribute(LINK_INFO, &attribute(KIND, kind));
            [vec![0; INFO], attribute(NAME, name), info].concat()
        };
        assert_eq!(macsec_of(&link(b"secret0\0", b"macsec\0")), Some("secret0".into()));
        assert_eq!(macsec_of(&link(b"br0\0", b"bridge\0")), None);
        assert_eq!(macsec_of(&[vec![0; INFO], attribute(NAME, b"lo\0")].concat()), None);
        assert_eq!(macsec_of(&[0; 3]), None);
        let refused = refuse_devices(vec!["secret0".into()]).expect_err("refused");
        assert!(refused.code == Some(Code::MacsecInUse) && refused.message.contains("secret0"), "{refused}");
        assert!(refuse_devices(Vec::new()).is_ok());
    }

    /// Reads this machine's devices, of which there is at least one.
    #[test]
    fn the_kernel_lists_its_devices() {
        let links =
            Socket::open(libc::NETLINK_ROUTE).and_then(|mut socket| socket.dump(GET_LINK, &[0; INFO]));
        let links = links.expect("a list");
        let names = links.iter().flat_map(|link| attributes(&link[INFO..])).filter(|(kind, _)| *kind == NAME);
        assert!(names.map(|(_, name)| text(name)).any(|name| name == "lo"));
    }
}
