//! Devices that are made of cards: bonds and bridges, as far as a move concerns them. A machine
//! that has arrived gets new card addresses, and the devices made of the cards have to follow.

use super::{Mac, parse_mac};
use mercury_control::sysroot::Sysroot;

/// The kernel's value for an address that an operator has set (`NET_ADDR_SET`).
const GIVEN: &str = "3";

/// Returns the cards that belong to a device which would not follow them, each with the device's
/// name: any device except bridges and VRFs. A bond has one address for all of its cards, and each
/// card has another address after a move.
#[must_use]
pub fn bundled(cards: &[super::Card], sysroot: &Sysroot) -> Vec<(String, String)> {
    let whole = |name: &str| {
        let master = std::fs::read_link(sysroot.path(&format!("sys/class/net/{name}/master"))).ok()?;
        master.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    let follows = |whole: &str| {
        let kind = sysroot.text(&format!("sys/class/net/{whole}/uevent")).unwrap_or_default();
        is_bridge(whole, sysroot) || kind.lines().any(|line| line == "DEVTYPE=vrf")
    };
    let up = cards.iter().filter(|card| card.up);
    let bundled = up.filter_map(|card| Some((card.name.clone(), whole(&card.name)?)));
    bundled.filter(|(_, whole)| !follows(whole)).collect()
}

fn is_bridge(name: &str, sysroot: &Sysroot) -> bool {
    sysroot.exists(&format!("sys/class/net/{name}/bridge"))
}

/// Returns the bridges that were given an address, which they keep whatever their cards have, by
/// name.
#[must_use]
pub fn given_bridges(sysroot: &Sysroot) -> Vec<(String, Mac)> {
    let given = |name: String| {
        let text = |file: &str| sysroot.text(&format!("sys/class/net/{name}/{file}"));
        let is_given = text("addr_assign_type")?.trim() == GIVEN;
        let mac = parse_mac(text("address")?.trim())?;
        (is_given && is_bridge(&name, sysroot)).then_some((name, mac))
    };
    sysroot.names("sys/class/net").into_iter().filter_map(given).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::Card, *};
    use std::{fs, path::Path};

    fn write(root: &Path, name: &str, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = root.join("sys/class/net").join(name).join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("a file");
        }
    }

    fn joins(root: &Path, card: &str, whole: &str) {
        let net = root.join("sys/class/net");
        fs::create_dir_all(net.join(card)).expect("a folder");
        std::os::unix::fs::symlink(format!("../../../virtual/net/{whole}"), net.join(card).join("master"))
            .expect("a link");
    }

    #[test]
    fn bonds_are_found_and_bridges_follow() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        write(
            root,
            "bond0",
            &[("bonding/mode", "802.3ad 4\n"), ("uevent", "DEVTYPE=bond\nINTERFACE=bond0\n")],
        );
        write(root, "team0", &[("uevent", "INTERFACE=team0\n")]);
        write(root, "red", &[("uevent", "DEVTYPE=vrf\nINTERFACE=red\n")]);
        write(root, "br0", &[("bridge/bridge_id", "x"), ("uevent", "DEVTYPE=bridge\n")]);
        for (card, whole) in [("a", "bond0"), ("b", "br0"), ("c", "team0"), ("d", "red"), ("e", "bond0")] {
            joins(root, card, whole);
        }
        let card = |name: &str, up| Card { name: name.into(), up, ..Card::default() };
        let cards = [
            card("a", true),
            card("b", true),
            card("c", true),
            card("d", true),
            card("e", false),
            card("f", true),
        ];
        let found = bundled(&cards, &Sysroot::at(root));
        let pair = |card: &str, whole: &str| (card.to_owned(), whole.to_owned());
        assert_eq!(found, [pair("a", "bond0"), pair("c", "team0")]);
    }

    #[test]
    fn bridges_that_keep_their_address() {
        let folder = tempfile::tempdir().expect("a folder");
        let mac = ("address", "52:54:00:09:00:02\n");
        write(folder.path(), "br0", &[("bridge/bridge_id", "x"), mac, ("addr_assign_type", "3\n")]);
        write(folder.path(), "br1", &[("bridge/bridge_id", "x"), mac, ("addr_assign_type", "0\n")]);
        write(folder.path(), "veth", &[mac, ("addr_assign_type", "3\n")]);
        let found = given_bridges(&Sysroot::at(folder.path()));
        assert_eq!(found, [("br0".to_owned(), [0x52, 0x54, 0, 9, 0, 2])]);
    }
}
