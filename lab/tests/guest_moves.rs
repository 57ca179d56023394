//! Bare machines that move to a host in use, where they go on as guests (`mercury receive --beside`), and
//! back to their own hardware.

#![allow(clippy::unwrap_used)]

use mercury_lab::{
    Background, Bus, Error, Kernel, Machine, Nic, Platform, Qemu, Release, Result, Spec, System, Vendor,
    as_guest::{self, Guest, NAME, disk, virtio_disk},
    moving::{GOES_ON, LIMIT, PEER, Switch, migrate, pairing, receive, said, wait_more},
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong,
        script::{CLOCK, ECHO, TALK},
        start,
    },
    round_trip::RoundTrips,
};
use std::time::SystemTime;

/// The most memory of the monitor beside the guest's.
const MONITOR_MAX: u64 = 16 << 20;

fn need_kvm() -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")
}

/// Prints the machine's devices, and the names and addresses of its cards.
const DEVICES: &str = "cd /sys/bus/pci/devices; grep -H . */vendor */device; ls /sys/class/net; \
    ip -4 -o address | sed 's/^[0-9]*: //'";

/// A machine like metal, and a host in use, on one network with a third machine.
struct Scene {
    switch: Switch,
    source: Machine,
    host: Machine,
}

/// Returns a machine like metal with room for a restore environment beside what arrives.
fn metal(kernel: Kernel, cpus: u32) -> Spec {
    as_guest::metal(kernel, cpus).memory_mib(1024)
}

impl Scene {
    fn new(kernel: Kernel, cpus: u32) -> Result<Self> {
        Self::of(kernel, as_guest::in_ram(metal(kernel, cpus)), |host| host)
    }

    /// Boots this source with some kernel, and a host of the same release with what `add` adds to it.
    fn of(kernel: Kernel, source: Spec, add: impl FnOnce(Spec) -> Spec) -> Result<Self> {
        let switch = Switch::boot_for(kernel)?;
        let hosts = match kernel.release() {
            Release::Bookworm => Kernel::BookwormCloud,
            Release::Trixie => Kernel::TrixieCloud,
        };
        let source = switch.boot_other(switch.plug_metal(source))?;
        set_time(&source)?;
        let host = add(switch.plugged(hosts, 2, 1800, 3));
        let host = switch.boot_other(as_guest::with_ports(host))?;
        as_guest::bridge(&host, "10.9.0.3")?;
        plug_metal_in(&source, "10.9.0.2")?;
        start(&source, "clock", CLOCK, "")?;
        start(&source, "talk", TALK, PEER)?;
        Ok(Self { switch, source, host })
    }
}

/// Sets the machine's time, and not its RTC.
fn set_time(machine: &Machine) -> Result<()> {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
    machine.sh(&format!("date -s @{now:.3}")).map(drop)
}

fn plug_metal_in(machine: &Machine, address: &str) -> Result<()> {
    machine.sh("modprobe e1000e; udevadm settle || true")?;
    let card = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1)";
    machine.sh(&format!("{card}; ip address add {address}/24 dev $card && ip link set $card up")).map(drop)
}

/// Moves the machine to the host, where it goes on as a guest at the end.
fn moves_in<'a>(source: &Machine, host: &'a Machine, boot_id: &str) -> Result<Guest<'a>> {
    let (guest, words) = Guest::receive(host, "--net tap=tap0 --listen 10.9.0.3")?;
    arrives(source, guest, &migrate(&words, "--max-throttle 0"), boot_id)
}

/// Moves the machine by this command to a host that waits.
fn arrives<'a>(source: &Machine, mut guest: Guest<'a>, command: &str, boot_id: &str) -> Result<Guest<'a>> {
    let mut moving = source.spawn(command)?;
    if let Err(error) = source.wait_moved(&mut moving, LIMIT) {
        println!("{:?} {:?}", moving.output_so_far(), moving.errors_so_far());
        println!("{:?}\n{}\n{}", guest.printed(), guest.console(), said(source));
        return Err(error);
    }
    guest.wait()?;
    println!("{}\n{}", said(source), guest.printed()?);
    is_well(&guest, boot_id)?;
    println!("{}", guest.sh("ip address; ip route; dmesg | tail -40")?);
    Ok(guest)
}

/// Checks that the connection with the third machine lives.
fn talks(machine: &impl System, peer: &Machine) -> Result<()> {
    comes_further(machine, "talk", count(machine, "talk")? + 5)?;
    nothing_wrong(peer)
}

/// Moves a running machine like metal to a host in use, where it goes on as a guest. Its connection with a
/// third machine lives on.
#[test]
#[ignore = "long"]
fn a_bare_machine_moves_to_a_host_in_use() -> Result<()> {
    need_kvm()?;
    let Scene { switch, source, host } = Scene::new(Kernel::BookwormGeneric, 1)?;
    let work = host.start_work()?;
    let guest = moves_in(&source, &host, &boot_id(&source)?)?;
    talks(&guest, &switch.peer)?;
    guest.check_log()?;
    is_seen_and_stopped(&host, guest)?;
    work.finish()?;
    host.check_health()
}

/// Moves a machine like metal to a host in use, and from there to another one, by an order of the first. The
/// machine's RTC is years behind its time, and those of the hosts are right.
#[test]
#[ignore = "long"]
fn a_guest_moves_on_to_another_host_in_use() -> Result<()> {
    need_kvm()?;
    let metal = as_guest::in_ram(as_guest::metal(Kernel::BookwormGeneric, 1));
    let metal = metal.qemu_arg("-rtc").qemu_arg("base=2020-01-01T00:00:00");
    let Scene { switch, source, host } = Scene::of(Kernel::BookwormGeneric, metal, |host| host)?;
    assert!(source.sh("cat /sys/class/rtc/rtc0/date")?.starts_with("2020-"));
    let boot_id = boot_id(&source)?;
    let guest = moves_in(&source, &host, &boot_id)?;
    talks(&guest, &switch.peer)?;

    drop(source);
    let other = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(1800).qemu_version(Qemu::Newer);
    let other = switch.boot_other(as_guest::with_ports(switch.plug_instead(other)))?;
    as_guest::bridge(&other, "10.9.0.4")?;
    let work = other.start_work()?;
    let (mut there, words) = Guest::receive(&other, "--net tap=tap0 --listen 10.9.0.4")?;
    let mut moving = order(&host, &guest, &words, "--max-throttle 0 --pool 150M")?;
    if let Err(error) = there.wait() {
        println!("{:?} {:?}", moving.output_so_far(), moving.errors_so_far());
        println!("{}\n{}", guest.console(), there.console());
        return Err(error);
    }
    println!("{}\n{}", guest.ends()?, there.printed()?);
    let said = moving.wait(LIMIT)?.check()?.stdout;
    assert!(said.contains("has moved") && said.contains("found by a dirty log"), "{said}");
    is_well(&there, &boot_id)?;
    talks(&there, &switch.peer)?;
    there.check_log()?;
    println!("{}", there.sh("ip address; ip route; dmesg | tail -40")?);
    assert_eq!(host.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    host.check_health()?;
    is_seen_and_stopped(&other, there)?;
    work.finish()?;
    other.check_health()
}

/// The place where a move of a guest is ordered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ordered {
    InGuest,
    ByHost,
}

/// Orders the guest to move to where these words of a destination say, after it could not move elsewhere.
fn order(host: &Machine, guest: &Guest<'_>, words: &str, options: &str) -> Result<Background> {
    guest.sh("test -e /usr/sbin/mercury || ln -s $(command -v mercury) /usr/sbin/mercury")?;
    let (to, key) = words.split_once(" --key ").unwrap();
    let refused = host.mercury_refused(&format!("guests migrate {NAME} {PEER}:9 --key {key}"))?;
    assert!(refused.text.contains("goes on here: "), "{refused:?}");
    host.spawn(&format!("exec mercury guests migrate {NAME} {to} --key {key} -- {options}"))
}

/// Moves a machine like metal to a host in use, and from there back to its own hardware: there are the same
/// devices, names and addresses again, and it is native. The host's KVM offers no virtualization to its
/// guests, so the monitor stands in for the hypervisor.
fn there_and_back(kernel: Kernel, cpus: u32, ordered: Ordered, more: &str) -> Result<()> {
    need_kvm()?;
    let Scene { switch, source, host } = Scene::new(kernel, cpus)?;
    host.sh("modprobe kvm_amd nested=0 && grep -E '^(0|N)$' /sys/module/kvm_amd/parameters/nested")?;
    let boot_id = boot_id(&source)?;
    let before = source.sh(DEVICES)?;
    let guest = moves_in(&source, &host, &boot_id)?;
    talks(&guest, &switch.peer)?;
    knows_its_monitor(&guest)?;

    let repaired = source.start_as(switch.plug_metal(metal(kernel, cpus)))?;
    plug_metal_in(&repaired, "10.9.0.4")?;
    let words = receive(&repaired, "10.9.0.4")?;
    let boots = repaired.boots();
    let options = format!("--max-throttle 0 --pool 300M {more}");
    let mut moving = match ordered {
        Ordered::InGuest => guest.link().spawn(&migrate(&words, &options))?,
        Ordered::ByHost => order(&host, &guest, &words, &options)?,
    };
    if let Err(error) = repaired.wait_other(boots) {
        println!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), guest.console());
        return Err(error);
    }
    println!("{}", guest.ends()?);
    if ordered == Ordered::ByHost {
        let output = moving.wait(LIMIT)?.check()?;
        let said = output.stdout + &output.stderr;
        let verified = more.contains("--verify-log").then_some("0 pages were missing in the dirty log");
        let words = ["applications stand still now", "has moved", "found by a dirty log"];
        for words in words.into_iter().chain(verified) {
            assert!(said.contains(words), "{said}");
        }
    }
    is_well(&repaired, &boot_id)?;
    assert_eq!(repaired.sh(DEVICES)?, before);
    talks(&repaired, &switch.peer)?;
    repaired.sh("mercury verify")?;
    println!("{}", repaired.sh("dmesg | tail -40")?);
    host.check_health()?;
    repaired.check_next_attach()
}

#[test]
#[ignore = "long"]
fn a_machine_comes_back_from_a_host_in_use() -> Result<()> {
    there_and_back(Kernel::BookwormGeneric, 1, Ordered::InGuest, "")
}

/// The same with two processors, by an order of the host.
#[test]
#[ignore = "long"]
fn a_host_in_use_sends_a_machine_back() -> Result<()> {
    there_and_back(Kernel::BookwormGeneric, 2, Ordered::ByHost, "")
}

/// The same with Linux 6.12 in both, and with all of memory compared with what the dirty log has found.
#[test]
#[ignore = "long"]
fn a_host_in_use_sends_a_machine_back_with_linux_6_12() -> Result<()> {
    there_and_back(Kernel::TrixieGeneric, 2, Ordered::ByHost, "--verify-log")
}

/// Lets the host's operator decide for a guest whose destination was told to start it, and is gone. The
/// guest's console is a screen, which the monitor does not show.
#[test]
#[ignore = "long"]
fn a_guest_in_doubt_goes_on_by_a_word_of_its_host() -> Result<()> {
    need_kvm()?;
    let kernel = Kernel::BookwormGeneric;
    let source = as_guest::in_ram(metal(kernel, 1)).kernel_arg("console=tty0");
    let Scene { switch, source, host } = Scene::of(kernel, source, |host| host)?;
    let boot_id = boot_id(&source)?;
    let guest = moves_in(&source, &host, &boot_id)?;
    assert_eq!(guest.sh("cat /sys/class/tty/console/active")?, "ttyS0 tty0");
    let refused = host.mercury_refused(&format!("guests resume {NAME}"))?;
    assert!(refused.text.contains("asks for no word"), "{refused:?}");

    let repaired = source.start_as(switch.plug_metal(metal(kernel, 1)))?;
    plug_metal_in(&repaired, "10.9.0.4")?;
    let words = receive(&repaired, "10.9.0.4")?;
    let moving = order(&host, &guest, &words, "--max-throttle 0 --pool 300M")?;
    wait_more(&repaired, GOES_ON, 0)?;
    repaired.power_cut()?;
    // The guest asks when it has heard nothing for some time.
    let decides = format!("until mercury guests resume {NAME}; do sleep 1; done");
    host.command(&decides).timeout(LIMIT).run()?.check()?;
    let output = moving.wait(LIMIT)?;
    assert!(!output.success() && output.stderr.contains("goes on here"), "{output:?}");
    is_well(&guest, &boot_id)?;
    talks(&guest, &switch.peer)?;
    is_seen_and_stopped(&host, guest)?;
    host.check_health()
}

/// Lets a machine like metal write itself to a disk and go on as a guest, which writes itself to another disk
/// and goes on as a guest again. From there it moves back to hardware of the same kind. One kernel, its
/// processes and a connection go through all of it.
#[test]
#[ignore = "long"]
fn a_machine_comes_back_after_two_checkpoints_and_two_lives_as_a_guest() -> Result<()> {
    const NETWORK: &str = "--json --console socket --net tap=tap0";
    need_kvm()?;
    let kernel = Kernel::BookwormGeneric;
    let switch = Switch::boot_for(kernel)?;
    let at_its_place = |spec| switch.plug_metal_at(spec, 3, Nic::E1000e);
    let source = switch.boot_other(at_its_place(as_guest::in_ram(metal(kernel, 1))))?;
    set_time(&source)?;
    plug_metal_in(&source, "10.9.0.2")?;
    start(&source, "clock", CLOCK, "")?;
    start(&source, "talk", TALK, PEER)?;
    let (boot_id, before) = (boot_id(&source)?, source.sh(DEVICES)?);
    as_guest::checkpoint(&source)?;

    let host = as_guest::host(Kernel::BookwormCloud, &source).memory_mib(2048).disk(Bus::Virtio, 1024);
    let host = switch.boot_other(switch.plug_instead(host))?;
    as_guest::bridge(&host, "10.9.0.3")?;
    let (image, other) = (virtio_disk(&host, "image")?, virtio_disk(&host, "mercury-disk0")?);
    // Both guests have the same virtio devices: the kernel in the second image drives those of the first.
    let options = format!("{NETWORK} --disk {other}");
    let guest = Guest::start_from(&host, &image, &options)?;
    is_well(&guest, &boot_id)?;
    talks(&guest, &switch.peer)?;
    // The second image is of a machine whose hardware is the monitor's.
    guest.sh("until test -b /dev/vda; do sleep 0.1; done; modprobe -r kvm_amd 2> /dev/null || true")?;
    let mut writing = guest.link().spawn("mercury checkpoint --poweroff /dev/vda")?;
    let console = guest.console();
    let said = guest.ends().inspect_err(|_| {
        println!("{:?} {:?}\n{console}", writing.output_so_far(), writing.errors_so_far());
    })?;
    assert!(said.contains("powered-off"), "{said}");
    // It has the line to the first guest's agent, which takes one client at a time.
    drop(writing);

    let guest = Guest::start_from(&host, &other, &options)?;
    is_well(&guest, &boot_id)?;
    talks(&guest, &switch.peer)?;
    let repaired = switch.boot_other(at_its_place(metal(kernel, 1)))?;
    plug_metal_in(&repaired, "10.9.0.4")?;
    let words = receive(&repaired, "10.9.0.4")?;
    let boots = repaired.boots();
    let mut moving = order(&host, &guest, &words, "--max-throttle 0 --pool 300M")?;
    if let Err(error) = repaired.wait_other(boots) {
        println!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), guest.console());
        return Err(error);
    }
    println!("{}", guest.ends()?);
    moving.wait(LIMIT)?.check()?;
    is_well(&repaired, &boot_id)?;
    assert_eq!(repaired.sh(DEVICES)?, before);
    talks(&repaired, &switch.peer)?;
    repaired.sh("mercury verify")?;
    host.check_health()?;
    repaired.check_next_attach()
}

/// Two machines like metal move to one host in use at once. Both go on there as guests, with their
/// connections.
#[test]
#[ignore = "long"]
fn two_machines_move_to_one_host_in_use_at_once() -> Result<()> {
    need_kvm()?;
    let kernel = Kernel::BookwormGeneric;
    let switch = Switch::boot_with(kernel, 3)?;
    let boot = |place: u8, address: &str| -> Result<Machine> {
        let spec = as_guest::in_ram(as_guest::metal(kernel, 1));
        let machine = switch.boot_other(switch.plug_metal_at(spec, place, Nic::E1000e))?;
        set_time(&machine)?;
        plug_metal_in(&machine, address)?;
        start(&machine, "clock", CLOCK, "")?;
        Ok(machine)
    };
    let (one, two) = (boot(2, "10.9.0.2")?, boot(4, "10.9.0.5")?);
    start(&one, "talk", TALK, PEER)?;
    // The lab has no way to the second guest but the network.
    start(&two, "echo", ECHO, "")?;
    start(&switch.peer, "talk", TALK, "10.9.0.5")?;
    let host = switch.plugged(Kernel::BookwormCloud, 2, 2048, 3);
    let host = switch.boot_other(as_guest::with_ports(host))?;
    as_guest::bridge(&host, "10.9.0.3")?;
    host.sh("ip tuntap add tap1 mode tap; ip link set tap1 master bridge0 up")?;
    let work = host.start_work()?;
    let (mut guest, words) = Guest::receive(&host, "--net tap=tap0 --listen 10.9.0.3:4747")?;
    let other = "exec mercury receive --beside --name other --net tap=tap1 --listen 10.9.0.3:4748";
    let mut other = host.spawn(other)?;
    let others_words = pairing(&mut other)?;

    let boot_id = boot_id(&one)?;
    let mut moving = [(&one, &words), (&two, &others_words)]
        .map(|(machine, words)| machine.spawn(&migrate(words, "--max-throttle 0")));
    for (machine, moving) in [&one, &two].into_iter().zip(&mut moving) {
        let moving = moving.as_mut().map_err(|error| Error::Host(error.to_string()))?;
        machine.wait_moved(moving, LIMIT).inspect_err(|_| {
            println!("{:?} {:?}\n{}", moving.output_so_far(), moving.errors_so_far(), said(machine));
            println!("{:?} {:?} {:?}", guest.printed(), other.output_so_far(), other.errors_so_far());
        })?;
    }
    guest.wait()?;
    is_well(&guest, &boot_id)?;
    talks(&guest, &switch.peer)?;
    comes_further(&switch.peer, "talk", count(&switch.peer, "talk")? + 5)?;
    let listed = host.mercury("guests list")?;
    let guests = listed["guests"].as_array().unwrap();
    let states: Vec<_> = guests.iter().map(|one| (one["name"].as_str(), one["phase"].as_str())).collect();
    let runs = |name| (Some(name), Some("running"));
    assert_eq!(states, [runs(NAME), runs("other")], "{listed}");
    guest.check_log()?;
    host.sh("mercury guests stop other")?;
    other.wait(LIMIT)?.check()?;
    is_seen_and_stopped(&host, guest)?;
    work.finish()?;
    host.check_health()
}

/// Checks that the commands in a guest name the monitor, and that a move is possible, without attach and
/// without a place for a tombstone.
fn knows_its_monitor(guest: &Guest<'_>) -> Result<()> {
    const MONITOR: &str = "monitor runs this machine as a guest";
    let status = guest.sh("mercury status")?;
    assert!(status.contains(MONITOR), "{status}");
    let said = guest.sh("mercury doctor || true")?;
    let possible = "`mercury migrate` is possible";
    let refused = "`mercury checkpoint` would be refused";
    for words in [MONITOR, "monitor stands in for the hypervisor", possible, refused] {
        assert!(said.contains(words), "{said}");
    }
    Ok(())
}

/// Prints each block device with its type, size and mount point.
const DISKS: &str = "lsblk -brno NAME,TYPE,SIZE,MOUNTPOINT | sort";

/// Moves a machine like metal with its root on NVMe to a host in use, with all its disks that are mounted.
/// What does not come along is named before.
#[test]
#[ignore = "long"]
fn a_bare_machine_moves_with_its_disks_to_a_host_in_use() -> Result<()> {
    need_kvm()?;
    let metal = as_guest::metal(Kernel::BookwormGeneric, 1).memory_mib(768);
    let Scene { switch, source, host } =
        Scene::of(Kernel::BookwormGeneric, as_guest::on_nvme(metal), |host| host.disk(Bus::Virtio, 6144))?;
    host.sh("modprobe -a virtio_blk ext4; mkfs.ext4 -q /dev/vda && mount /dev/vda /srv")?;
    source.sh("echo before > /root/before && head -c 3000000 /dev/urandom > /root/noise && sync")?;
    let noise = source.sh("md5sum < /root/noise")?;
    let [root, tools, spare] = ["root", "lab", "disk0"].map(|one| disk(&source, &format!("mercury-{one}")));
    let (root, tools, spare) = (root?, tools?, spare?);
    let mounts = source.sh(&format!("{DISKS} | grep -E '^({root}|{tools})'"))?;

    let (guest, words) = Guest::receive(&host, "--net tap=tap0 --listen 10.9.0.3 --disk-folder /srv")?;
    source.sh(&format!("mkswap -q /dev/{spare} && swapon /dev/{spare}"))?;
    let refused = source.run(&migrate(&words, &format!("--with-disk /dev/{root}")))?;
    for reason in [format!("swap is on /dev/{spare}"), format!("--with-disk /dev/{tools}")] {
        assert!(!refused.success() && refused.stderr.contains(&reason), "{}", refused.stderr);
    }
    assert_eq!(host.sh("ls /srv | grep -v lost || true")?, "", "the files of a machine that was refused");
    source.sh(&format!("swapoff /dev/{spare}"))?;

    let disks = format!("--max-throttle 0 --with-disk /dev/{root} --with-disk /dev/{tools}");
    let guest = arrives(&source, guest, &migrate(&words, &disks), &boot_id(&source)?)?;
    talks(&guest, &switch.peer)?;
    assert_eq!(guest.sh(&format!("{DISKS} | grep -E '^({root}|{tools})'"))?, mounts);
    guest.sh("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    assert_eq!(guest.sh("cat /root/before; md5sum < /root/noise")?, format!("before\n{noise}"));
    guest.sh("cp /root/noise /root/copy && rm /root/noise && sync")?;
    guest.check_log()?;
    assert_eq!(guest.sh("dmesg | grep -iE '(nvme.*(timeout|abort|fail)|(I/O|EXT4-fs) error)' || true")?, "");

    let said = guest.power_off()?;
    assert!(said.contains("powered itself off"), "{said}");
    println!("{}", host.sh(&format!("fsck.ext4 -fn /srv/{root}"))?);
    host.sh(&format!("modprobe loop; mount -o ro,loop /srv/{root} /mnt"))?;
    assert_eq!(host.sh("cd /mnt/root && md5sum < copy && test ! -e noise")?, noise);
    host.sh("umount /mnt && umount /srv")?;
    host.check_health()
}

/// Checks that the commands about guests show the guest, and end it.
fn is_seen_and_stopped(host: &Machine, guest: Guest<'_>) -> Result<()> {
    let listed = host.mercury("guests list")?;
    let one = &listed["guests"][0];
    assert_eq!((one["name"].as_str(), one["phase"].as_str()), (Some(NAME), Some("running")), "{listed}");
    comes_further(&guest, "clock", count(&guest, "clock")?)?;
    let said = guest.stop()?;
    assert!(said.contains(&format!("stopped {NAME}")), "{said}");
    assert_eq!(host.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    let again = host.mercury_refused(&format!("guests stop {NAME}"))?;
    assert_eq!(again.exit, 5, "{again:?}");
    Ok(())
}

/// Moves a machine with PostgreSQL to a host in use and back to its hardware, again and again. Clients on a
/// third machine lose no transaction and no connection. `MERCURY_LAB_ROUND_TRIPS` says how often.
#[test]
#[ignore = "long"]
fn postgresql_goes_there_and_back() -> Result<()> {
    need_kvm()?;
    let count = std::env::var("MERCURY_LAB_ROUND_TRIPS").ok().map_or(1, |text| text.parse().unwrap());
    // After one trip QEMU's e1000e may receive nothing (docs/limits.md).
    let nic = if count == 1 { Nic::E1000e } else { Nic::Virtio };
    let mut trips = RoundTrips::begin(Kernel::BookwormGeneric, 1, nic)?;
    for number in 1..=count {
        let trip = trips.there_and_back()?;
        println!("round trip {number} of {count}: {trip:?}");
        assert!(trip.monitor_bytes <= MONITOR_MAX, "{trip:?}");
    }
    let ledger = trips.finish()?;
    println!("{ledger:?}");
    assert!(ledger.is_right(), "{ledger:?}");
    Ok(())
}
