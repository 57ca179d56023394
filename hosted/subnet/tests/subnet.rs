//! Machines on a subnet, with its keeper in a thread of the test.

#![allow(clippy::unwrap_used)]

use std::{
    fs::File,
    path::Path,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mercury_hosted_options::net::SubnetName;
use mercury_subnet::{
    Address,
    keeper::Keeper,
    member::{self, Error},
    offload::Offload,
    place::Folder,
    port::{PATIENCE, Port, Sent},
};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;
use vm_memory::Bytes;

const ALL: Address = [0xFF; 6];
const LIMIT: Duration = Duration::from_secs(20);

/// The files of a test's subnets.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn folder(&self) -> Folder {
        Folder::at(&self.path().join("subnets"))
    }

    /// Starts a keeper, which can be reached when the function returns.
    fn keep(&self, name: &str) -> JoinHandle<()> {
        let (folder, name): (Folder, SubnetName) = (self.folder(), name.parse().unwrap());
        let (ready, is_ready) = mpsc::channel();
        let keeper = thread::spawn(move || {
            let keeper = Keeper::start(&folder, &name, &address).unwrap();
            ready.send(()).unwrap();
            keeper.serve().unwrap();
        });
        is_ready.recv().unwrap();
        keeper
    }

    fn join(&self, name: &str, wanted: Option<Address>) -> Result<Port, Error> {
        let membership = member::join(&self.folder(), &name.parse().unwrap(), wanted, || {
            self.keep(name);
            Ok(())
        })?;
        Ok(Port::new(membership).unwrap())
    }
}

fn address(slot: usize) -> Address {
    [2, 0, 0, 0, 0, slot as u8]
}

fn frame(to: Address, from: Address, length: usize, seed: u8) -> Vec<u8> {
    let rest = (12..length).map(|at| (at as u8).wrapping_mul(7).wrapping_add(seed));
    to.into_iter().chain(from).chain(rest).collect()
}

fn send(port: &mut Port, frame: &[u8]) -> Sent {
    let to = *frame.first_chunk().unwrap();
    port.send(to, frame.len(), Offload::default(), |place| place.write_slice(frame, 0).unwrap())
}

fn receive(port: &mut Port) -> Option<Vec<u8>> {
    let slot = port.choose()?;
    let found = port.frame(slot).unwrap();
    let mut bytes = vec![0; found.bytes.len()];
    found.bytes.read_slice(&mut bytes, 0).unwrap();
    port.release(slot);
    Some(bytes)
}

/// Waits until a condition holds.
fn wait_for(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT);
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn frames_go_to_the_machine_of_an_address_and_to_all_if_it_is_unknown() {
    let place = Place::new();
    let [mut a, mut b, mut c] = [0; 3].map(|_| place.join("web", None).unwrap());
    let everyone = frame(ALL, address(0), 60, 1);
    assert_eq!(send(&mut a, &everyone), Sent::Done);
    assert_eq!([receive(&mut b), receive(&mut c)], [Some(everyone.clone()), Some(everyone)]);
    let answer = frame(address(0), address(1), 65549, 2);
    send(&mut b, &answer);
    assert_eq!((receive(&mut a), receive(&mut c)), (Some(answer), None));
    let unknown = frame([2, 9, 9, 9, 9, 9], address(0), 60, 3);
    send(&mut a, &unknown);
    assert_eq!(
        [receive(&mut b), receive(&mut c), receive(&mut a)],
        [Some(unknown.clone()), Some(unknown), None]
    );
}

#[test]
fn subnets_of_other_names_hear_nothing() {
    let place = Place::new();
    let mut a = place.join("one", None).unwrap();
    let mut b = place.join("two", None).unwrap();
    let mut c = place.join("one", None).unwrap();
    send(&mut a, &frame(ALL, address(0), 60, 1));
    assert!(receive(&mut b).is_none() && receive(&mut c).is_some());
    assert_eq!(place.folder().names().unwrap(), ["one".parse().unwrap(), "two".parse().unwrap()]);
}

#[test]
fn a_machine_that_leaves_is_missed_by_none_and_its_place_is_given_away_empty() {
    let place = Place::new();
    let [mut a, mut b, mut c] = [0; 3].map(|_| place.join("web", None).unwrap());
    send(&mut b, &frame(ALL, address(1), 60, 1));
    assert!(receive(&mut a).is_some() && receive(&mut c).is_some());
    for seed in 0..50 {
        assert_eq!(send(&mut a, &frame(address(1), address(0), 1000, seed)), Sent::Done);
    }
    let present = || member::list(&place.folder(), &"web".parse().unwrap()).unwrap().unwrap();
    assert_eq!(present().len(), 3);
    drop(b);
    wait_for(|| present().len() == 2);
    for seed in 0..200 {
        // More than a ring holds, to a machine that is not there.
        assert_eq!(send(&mut a, &frame(address(1), address(0), 60000, seed)), Sent::Done);
        while receive(&mut c).is_some() {}
    }
    let mut next = place.join("web", None).unwrap();
    assert_eq!(present().iter().map(|one| one.slot).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(receive(&mut next).is_none());
    let fresh = frame(ALL, address(0), 60, 9);
    send(&mut a, &fresh);
    assert_eq!([receive(&mut next), receive(&mut c)], [Some(fresh.clone()), Some(fresh)]);
    let from_next = frame(address(0), address(1), 60, 10);
    send(&mut next, &from_next);
    assert_eq!(receive(&mut a), Some(from_next));
}

#[test]
fn a_machine_that_does_not_read_costs_one_wait_and_others_get_their_frames() {
    let place = Place::new();
    let [mut a, mut b, mut c] = [0; 3].map(|_| place.join("web", None).unwrap());
    send(&mut b, &frame(ALL, address(1), 60, 1));
    send(&mut c, &frame(ALL, address(2), 60, 1));
    while receive(&mut a).is_some() {}
    let to_b = |seed| frame(address(1), address(0), 60000, seed);
    while send(&mut a, &to_b(1)) == Sent::Done {
        assert!(!a.waits());
    }
    assert!(a.waits());
    assert_eq!(send(&mut a, &to_b(2)), Sent::Later);
    thread::sleep(PATIENCE);
    for seed in 0..100 {
        assert_eq!(send(&mut a, &to_b(seed)), Sent::Done);
        let to_c = frame(address(2), address(0), 60000, seed);
        assert_eq!(send(&mut a, &to_c), Sent::Done);
        while let Some(found) = receive(&mut c) {
            assert!(found[..6] != address(2) || found == to_c);
        }
    }
    assert!(!a.waits());
    // It reads again: what comes then is for it.
    while receive(&mut b).is_some() {}
    let last = to_b(77);
    send(&mut a, &last);
    assert!(receive(&mut b) == Some(last));
}

#[test]
fn a_sleeping_machine_s_bell_rings_once() {
    let place = Place::new();
    let [mut a, mut b] = [0; 2].map(|_| place.join("web", None).unwrap());
    let rings = |port: &Port| rustix::io::read(port.bell(), &mut [0; 64]).unwrap_or(0);
    rings(&b);
    assert!(b.sleep());
    for seed in 0..3 {
        send(&mut a, &frame(ALL, address(0), 60, seed));
    }
    assert_eq!(rings(&b), 1);
    assert!(!b.sleep());
    while receive(&mut b).is_some() {}
    assert!(b.sleep());
    send(&mut a, &frame(ALL, address(0), 60, 3));
    assert_eq!(rings(&b), 1);
}

#[test]
fn an_address_is_given_once() {
    let place = Place::new();
    let wanted = [2, 1, 2, 3, 4, 5];
    let _one = place.join("web", Some(wanted)).unwrap();
    let refused = place.join("web", Some(wanted)).unwrap_err();
    assert!(refused.message().contains("has this address") && refused.remedy().unwrap().contains("--mac"));
    place.join("web", None).unwrap();
}

#[test]
fn the_keeper_ends_with_the_last_machine_and_a_new_one_begins() {
    let place = Place::new();
    let name = "web".parse().unwrap();
    let mut keeper = None;
    let start = || {
        keeper = Some(place.keep("web"));
        Ok(())
    };
    let one = member::join(&place.folder(), &name, None, start).unwrap();
    let keeper = keeper.unwrap();
    let two = place.join("web", None).unwrap();
    drop(one);
    thread::sleep(Duration::from_millis(500));
    assert!(!keeper.is_finished());
    drop(two);
    keeper.join().unwrap();
    assert!(member::list(&place.folder(), &name).unwrap().is_none());
    assert_eq!(place.folder().names().unwrap(), []);
    place.join("web", None).unwrap();
}

#[test]
fn a_subnet_whose_keeper_was_killed_takes_no_other_machine() {
    let place = Place::new();
    place.folder().make().unwrap();
    let lock = File::create(place.path().join("subnets/web.members")).unwrap();
    flock(&lock, FlockOperation::LockShared).unwrap();
    let refused = place.join("web", None).unwrap_err();
    assert!(refused.message().contains("while machines are on it"), "{refused}");
    drop(lock);
    place.join("web", None).unwrap();
}

#[test]
fn strange_packets_end_a_connection_and_nothing_else() {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send as send_packet, socket,
    };
    let place = Place::new();
    let mut a = place.join("web", None).unwrap();
    let path = place.folder().socket(&"web".parse().unwrap());
    for packet in [&b""[..], b"x", &[0; 16], &[0xFF; 4000], b"MERCSUB\x01\x01\x02345678"] {
        let stranger = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&stranger, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let _ = send_packet(&stranger, packet, SendFlags::NOSIGNAL);
    }
    let mut b = place.join("web", None).unwrap();
    send(&mut a, &frame(ALL, address(0), 60, 1));
    assert!(receive(&mut b).is_some());
}
