//! Bare machines that go on as guests of a host that is in use (`mercury restore --as-guest`).

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use mercury_lab::{
    Bus, Error, Init, Kernel, Machine, Platform, Qemu, Result, Spec, Vendor,
    as_guest::{self, Guest, IMAGE, NAME},
    command::patient,
    error::wait_for,
    host::find_program,
    moving::{MOVING, PEER, Switch},
    restart::{
        boot_id, comes_further, count, is_well, knows_the_time,
        script::{ANNOUNCED, ATTACH_BLOCKS, BLOCKS, CLOCK, ECHO, HEAR, READS, TALK},
        start,
    },
};

/// Largest memory of the monitor beside the guest's, in bytes.
const MONITOR_MAX: u64 = 16 << 20;
/// Card of the source on the switch.
const CARD: &str = "52:54:00:09:00:02";

fn need_kvm() -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")
}

/// Writes a source to its disk, and boots a host in its place.
fn moves_to_a_host(source: &Machine) -> Result<Machine> {
    as_guest::checkpoint(source)?;
    source.boot_in_its_place(as_guest::host(Kernel::BookwormCloud, source))
}

/// Boots a machine like metal, lets it go on as a guest of another machine, and checks both.
fn goes_on(spec: Spec, cpus: u32) -> Result<()> {
    need_kvm()?;
    let source = Machine::boot(spec)?;
    start(&source, "clock", CLOCK, "")?;
    start(&source, "counter", COUNTER, "")?;
    let (boot_id, before) = (boot_id(&source)?, count(&source, "clock")?);
    println!("{}", source.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource")?);
    let host = moves_to_a_host(&source)?;
    let work = host.start_work()?;
    let started = Instant::now();
    let guest = Guest::start(&host, "--json --console socket")?;
    println!("the guest answers after {:.1} s", started.elapsed().as_secs_f32());
    is_well(&guest, &boot_id)?;
    assert!(count(&guest, "clock")? > before);
    assert_eq!(guest.sh("nproc")?, cpus.to_string());
    // Nothing of what is gone is left, and no application waited for it.
    let left = guest.sh("ls /sys/bus/pci/devices /sys/class/net /sys/block")?;
    println!("{left}\n{}", guest.sh("dmesg | tail -40")?);
    work.finish()?;
    time_passes(&host, &guest)?;
    guest.check_log()?;
    is_seen_and_stopped(&host, guest)?;
    host.check_health()
}

/// Reads the time-stamp counter on each processor in turn: it never goes back.
const COUNTER: &str = r#"
import ctypes, mmap, time
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
# rdtscp; shl rdx, 32; or rax, rdx; ret
code.write(bytes.fromhex("0f01f948c1e2204809d0c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)
before, count = 0, 0
while True:
    for cpu in range(os.cpu_count()):
        os.sched_setaffinity(0, {cpu})
        now = read()
        if now < before:
            wrong(f"{now} on CPU {cpu} after {before}")
        before = now
    count += 1
    say(count)
    time.sleep(0.05)
"#;

/// Compares the guest's clocks with the lab's: ten seconds of sleep take ten seconds.
fn time_passes(host: &Machine, guest: &Guest<'_>) -> Result<()> {
    let clocks = |system: &dyn Fn(&str) -> Result<String>| -> Result<f64> {
        Ok(system("cut -d ' ' -f 1 /proc/uptime")?.trim().parse().unwrap())
    };
    let (in_guest, in_host) = (|line: &str| guest.sh(line), |line: &str| host.sh(line));
    let (began, outside) = (clocks(&in_guest)?, Instant::now());
    let beside = clocks(&in_host)?;
    guest.sh("sleep 10")?;
    let (inside, outside) = (clocks(&in_guest)? - began, outside.elapsed().as_secs_f64());
    let beside = clocks(&in_host)? - beside;
    println!("ten seconds: {inside:.2} s in the guest, {beside:.2} s in its host, {outside:.2} s outside");
    // The guest's stretch lies within the others', but for the way of the commands.
    let late = patient(Duration::from_secs(2)).as_secs_f64();
    assert!((10.0..10.0 + late).contains(&inside), "{inside}");
    assert!((inside - outside).abs() < 0.6 && (inside - beside).abs() < 0.6, "{inside} {beside} {outside}");
    knows_the_time(guest, "after a sleep")?;
    comes_further(guest, "counter", count(guest, "counter")?)
}

/// Checks that the commands about guests show the guest, and end it.
fn is_seen_and_stopped(host: &Machine, guest: Guest<'_>) -> Result<()> {
    let listed = host.mercury("guests list")?;
    let one = &listed["guests"][0];
    assert_eq!((one["name"].as_str(), one["phase"].as_str()), (Some(NAME), Some("running")), "{listed}");
    comes_further(&guest, "clock", count(&guest, "clock")?)?;
    let said = guest.stop()?;
    assert!(said.contains(&format!("stopped {NAME}")), "{said}");
    let ended =
        said.find('{').and_then(|start| serde_json::from_str::<serde_json::Value>(&said[start..]).ok());
    let ended = ended.ok_or_else(|| host.blame(Error::Unhealthy(said)))?;
    println!("{ended}");
    assert_eq!(ended["end"], "stopped");
    assert!((1..=MONITOR_MAX).contains(&ended["monitor_bytes"].as_u64().unwrap()), "{ended}");
    assert_eq!(host.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    assert_eq!(host.sh("ls /run/mercury/guests")?, "");
    let again = host.mercury_refused(&format!("guests stop {NAME}"))?;
    assert_eq!(again.exit, 5, "{again:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_bare_machine_goes_on_as_a_guest() -> Result<()> {
    goes_on(as_guest::source(Kernel::BookwormGeneric, 1), 1)
}

/// A processor of the family of the lab's hosts with less than they have, and one with yet less.
const LESSER: &str = "EPYC,+svm,+npt,-avx2,-rdseed";
const LEAST: &str = "EPYC,+svm,+npt,-avx2,-rdseed,-aes,-bmi2";
/// A later model of that family.
const LATER: &str = "EPYC-Rome,+svm,+npt";

/// A host whose processor lacks what the machine's kernel uses refuses by name. One of a later model that has
/// all of it takes the machine.
#[test]
#[ignore = "long"]
fn a_machine_goes_on_where_the_processor_has_all_that_it_uses() -> Result<()> {
    need_kvm()?;
    let source = Machine::boot(as_guest::source(Kernel::BookwormGeneric, 1).cpu(LESSER))?;
    start(&source, "clock", CLOCK, "")?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;

    let spec = as_guest::host(Kernel::BookwormCloud, &source);
    let host = source.boot_in_its_place(spec.clone().cpu(LEAST))?;
    host.sh("modprobe kvm_amd")?;
    let refused = host.mercury_refused(&format!("restore {IMAGE} --as-guest"))?;
    assert_eq!((refused.exit, refused.code.as_str()), (3, "guest-features"), "{refused:?}");
    assert!(refused.text.contains("does not offer here: aes bmi2 [guest-features]"), "{refused:?}");
    host.shut_down()?;

    let host = source.boot_in_its_place(spec.cpu(LATER))?;
    let guest = Guest::start(&host, "--json --console socket")?;
    is_well(&guest, &boot_id)?;
    comes_further(&guest, "clock", count(&guest, "clock")?)?;
    guest.check_log()?;
    is_seen_and_stopped(&host, guest)?;
    host.check_health()
}

/// Runs two guests of one image, which share memory, on a host with systemd. It shows one as a unit with a
/// limit, and ends it by its unit.
#[test]
#[ignore = "long"]
fn clones_share_memory_and_are_units_of_their_host_s_systemd() -> Result<()> {
    need_kvm()?;
    let source = Machine::boot(as_guest::source(Kernel::BookwormGeneric, 1))?;
    start(&source, "clock", CLOCK, "")?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;
    let host = as_guest::host(Kernel::BookwormCloud, &source).init(Init::Systemd).memory_mib(1792);
    let host = source.boot_in_its_place(host)?;
    let options = "--console socket --memory-file /run/memory";
    host.sh("modprobe kvm_amd && systemctl start dbus.socket")?;
    let clone = host.spawn(&format!("exec mercury restore {IMAGE} --as-guest --name clone {options}"))?;
    wait_for("the first clone", patient(Duration::from_secs(120)), || {
        Ok(host.sh("mercury guests list")?.contains(" running ").then_some(()))
    })?;
    let guest = Guest::start(&host, options)?;
    is_well(&guest, &boot_id)?;
    let unit = format!("mercury-guest-{NAME}.scope");
    let listed = host.mercury("guests list")?;
    let one = listed["guests"].as_array().unwrap().iter().find(|one| one["name"] == NAME).unwrap();
    println!("{listed}\n{}", host.sh("mercury guests list")?);
    assert_eq!(one["unit"].as_str(), Some(unit.as_str()), "{listed}");
    let (used, memory) = (one["used_bytes"].as_u64().unwrap(), one["memory_bytes"].as_u64().unwrap());
    let show = |what: &str| host.sh(&format!("systemctl show --value -p {what} {unit}"));
    let limit: u64 = show("MemoryMax")?.parse().unwrap();
    // The pages that both share are the first one's.
    assert!((4 << 20..limit).contains(&used) && limit > memory, "{used} of {memory}, at most {limit}");
    let group = format!("/proc/{}/cgroup", one["pid"]);
    assert_eq!(host.sh(&format!("sed -n 's/^0:://p' {group}"))?, show("ControlGroup")?);
    let shared = "awk '/^Shared_/ { shared += $2 } END { print shared }'";
    let shared: u64 = host.sh(&format!("{shared} /proc/{}/smaps_rollup", one["pid"]))?.parse().unwrap();
    println!("{shared} KiB are shared");
    // Programs and libraries have less.
    assert!(shared > 32 << 10, "{shared} KiB");
    host.sh("mercury guests stop clone")?;
    clone.wait(Duration::from_secs(60))?.check()?;
    host.sh(&format!("systemctl stop {unit}"))?;
    let ended = guest.ends()?;
    assert!(ended.contains("was stopped"), "{ended}");
    assert_eq!(host.sh("ls /run/mercury/guests")?, "");
    host.check_health()
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_two_cpus_goes_on_as_a_guest() -> Result<()> {
    goes_on(as_guest::source(Kernel::BookwormGeneric, 2), 2)
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_6_12_goes_on_as_a_guest() -> Result<()> {
    goes_on(as_guest::source(Kernel::TrixieGeneric, 1), 1)
}

#[test]
#[ignore = "long"]
fn a_bare_machine_with_6_12_and_two_cpus_goes_on_as_a_guest() -> Result<()> {
    goes_on(as_guest::source(Kernel::TrixieGeneric, 2), 2)
}

/// The source's kernel takes its time from the HPET.
#[test]
#[ignore = "long"]
fn a_bare_machine_that_uses_the_hpet_goes_on_as_a_guest() -> Result<()> {
    goes_on(as_guest::source(Kernel::BookwormGeneric, 1).kernel_arg("clocksource=hpet"), 1)
}

/// The configuration of the network, as far as it is to come back, in a fixed order.
const CONFIGURATION: &str = "ip -4 -o address show dev eth0 scope global | sed 's/^[0-9]*: //'; \
    ip -4 route show table all type unicast | sort; ip -4 rule; ip -4 neigh show nud permanent; \
    cat /sys/class/net/eth0/mtu";
/// A configuration with more than one of each.
const CONFIGURE: &str = "ip address flush dev eth0; ip link set eth0 mtu 1400; \
    ip address add 10.9.0.2/24 dev eth0; ip address add 10.77.0.1/24 dev eth0; \
    ip route add default via 10.9.0.1; ip route add 10.88.0.0/16 via 10.9.0.7 table 77; \
    ip rule add to 10.88.0.0/16 lookup 77; \
    ip neigh replace 10.9.0.7 lladdr 52:54:00:00:00:77 dev eth0 nud permanent";

/// Boots a machine like metal on a switch.
fn boot_on(switch: &Switch, spec: Spec) -> Result<Machine> {
    let machine = switch.boot_other(switch.plug_metal(spec))?;
    machine.sh("modprobe e1000e; until test -e /sys/class/net/eth0; do sleep 0.1; done; sleep 1; \
        ip link set eth0 up")?;
    start(&machine, "clock", CLOCK, "")?;
    Ok(machine)
}

/// Boots a host in the place of a source that is off. The guest's card is on the source's network.
fn boot_host_on(switch: &Switch, source: &Machine) -> Result<Machine> {
    let host = switch.boot_other(switch.plug_instead(as_guest::host(Kernel::BookwormCloud, source)))?;
    as_guest::bridge(&host, "10.9.0.4")?;
    Ok(host)
}

/// Takes the network over: addresses, routes, rules and neighbours come to the new card, peers hear of it,
/// and connections in both directions go on.
#[test]
#[ignore = "long"]
fn connections_of_a_bare_machine_go_on_with_it_as_a_guest() -> Result<()> {
    need_kvm()?;
    let switch = Switch::boot_with(Kernel::BookwormGeneric, 1)?;
    let source = boot_on(&switch, as_guest::in_ram(as_guest::metal(Kernel::BookwormGeneric, 1)))?;
    source.sh(CONFIGURE)?;
    start(&source, "talk", TALK, PEER)?;
    start(&source, "hear", HEAR, "")?;
    switch.tell()?;
    start(&switch.peer, "announced", ANNOUNCED, &format!("{MOVING} {CARD}"))?;
    let (boot_id, before) = (boot_id(&source)?, source.sh(CONFIGURATION)?);
    println!("{before}");
    as_guest::checkpoint(&source)?;

    let host = boot_host_on(&switch, &source)?;
    let guest = Guest::start(&host, "--json --console socket --net tap=tap0")?;
    is_well(&guest, &boot_id)?;
    assert_eq!(guest.sh(CONFIGURATION)?, before);
    assert!(count(&switch.peer, "announced")? > 0);
    for connection in ["talk", "hear"] {
        let further = comes_further(&guest, connection, count(&guest, connection)? + 5);
        further.inspect_err(|_| {
            let sockets = "ss -tinm; cat /run/*.wrong";
            println!(
                "{}\n{}",
                guest.sh(sockets).unwrap_or_default(),
                switch.peer.sh(sockets).unwrap_or_default()
            );
        })?;
    }
    let card = guest.sh("cat /sys/class/net/eth0/address; readlink -f /sys/class/net/eth0/device")?;
    assert!(card.contains("virtio"), "{card}");
    let known = switch.peer.sh(&format!("ip neigh show {MOVING}"))?;
    assert!(known.contains(card.lines().next().unwrap()) && !known.contains(CARD), "{known}");
    guest.check_log()?;
    guest.stop()?;
    switch.peer.check_health()
}

/// Of two cards that are up only the second one is in use. The guest's only card takes that one over.
#[test]
#[ignore = "long"]
fn the_card_in_use_of_two_goes_on_with_a_bare_machine_as_a_guest() -> Result<()> {
    need_kvm()?;
    let switch = Switch::boot_with(Kernel::BookwormGeneric, 1)?;
    let unused = ["-netdev", "hubport,hubid=9,id=unused", "-device", "e1000e,netdev=unused,romfile="];
    let spec = as_guest::in_ram(as_guest::metal(Kernel::BookwormGeneric, 1));
    let source = boot_on(&switch, unused.into_iter().fold(spec, Spec::qemu_arg))?;
    let find = format!("basename $(dirname $(grep -l {CARD} /sys/class/net/*/address))");
    let used = source.sh(&find)?;
    assert_eq!(used, "eth1", "the card in use must not be the first one by name");
    // The lab gives its own user network to the first card. That one stays up, and goes without an address.
    source.sh("ip address flush dev eth0; ip link set eth1 up; ip address add 10.9.0.2/24 dev eth1; \
         ip route add default via 10.9.0.1")?;
    start(&source, "talk", TALK, PEER)?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;

    let host = boot_host_on(&switch, &source)?;
    let guest = Guest::start(&host, "--json --console socket --net tap=tap0")?;
    is_well(&guest, &boot_id)?;
    let addresses = guest.sh("ip -4 -o address show dev eth1; ip -4 route")?;
    println!("{addresses}\n{}", guest.sh("ls /sys/class/net")?);
    for words in ["inet 10.9.0.2/24", "default via 10.9.0.1 dev eth1"] {
        assert!(addresses.contains(words), "{addresses}");
    }
    guest.sh("! test -e /sys/class/net/eth0")?;
    comes_further(&guest, "talk", count(&guest, "talk")? + 5)?;
    guest.check_log()?;
    guest.stop()?;
    switch.peer.check_health()
}

/// Gives the guest the network of a passt of its own: it reaches other machines, and a port of its host leads
/// to it.
#[test]
#[ignore = "long"]
fn a_bare_machine_reaches_the_network_through_passt_as_a_guest() -> Result<()> {
    need_kvm()?;
    let Some(passt) = find_program("passt") else {
        println!("left out: passt is not installed");
        return Ok(());
    };
    let switch = Switch::boot_with(Kernel::BookwormGeneric, 1)?;
    let source = boot_on(&switch, as_guest::in_ram(as_guest::metal(Kernel::BookwormGeneric, 1)))?;
    source.sh(CONFIGURE)?;
    start(&source, "echo", ECHO, "")?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;

    let host = boot_host_on(&switch, &source)?;
    host.sh("ip route add default via 10.9.0.1")?;
    host.put("/usr/bin/passt", &std::fs::read(passt).unwrap(), 0o755)?;
    let guest = Guest::start(&host, "--json --console socket --net passt --forward 8007:7")?;
    is_well(&guest, &boot_id)?;
    start(&guest, "talk", TALK, PEER)?;
    comes_further(&guest, "talk", 5)?;
    let through = "import socket; peer = socket.create_connection(('10.9.0.4', 8007)); \
        peer.sendall(b'through'); print(peer.recv(64).decode())";
    assert_eq!(switch.peer.sh(&format!("timeout 60 python3 -c \"{through}\""))?, "through");
    guest.check_log()?;
    guest.stop()?;
    host.check_health()
}

/// Lets a machine go on with a file system on a disk of another machine, by NBD.
#[test]
#[ignore = "long"]
fn a_disk_on_a_network_goes_on_with_a_bare_machine_as_a_guest() -> Result<()> {
    need_kvm()?;
    let switch = Switch::boot_with(Kernel::BookwormGeneric, 1)?;
    let source = boot_on(&switch, as_guest::in_ram(as_guest::metal(Kernel::BookwormGeneric, 1)))?;
    source.sh(CONFIGURE)?;
    start(&switch.peer, "blocks", BLOCKS, "")?;
    // The small root has no mkfs.
    switch.peer.sh("mkfs.ext4 -q -b 4096 /run/blocks.disk && sync")?;
    source.sh("modprobe -a nbd ext4")?;
    start(&source, "attach_blocks", ATTACH_BLOCKS, PEER)?;
    source.sh("while pgrep -f '[a]ttach_blocks'; do sleep 0.1; done")?;
    source.sh("mount /dev/nbd0 /mnt && echo before > /mnt/before")?;
    let boot_id = boot_id(&source)?;
    // A restore environment would not find the disk.
    as_guest::checkpoint_with(&source, "--force-devices")?;

    let host = boot_host_on(&switch, &source)?;
    let guest = Guest::start(&host, "--json --console socket --net tap=tap0")?;
    is_well(&guest, &boot_id)?;
    let write = "cat /mnt/before; echo after > /mnt/after && sync -f /mnt/after && umount /mnt && echo done";
    assert_eq!(guest.sh(write)?, "before\ndone");
    println!("{}", switch.peer.sh("e2fsck -f -n /run/blocks.disk 2>&1")?);
    guest.check_log()?;
    guest.stop()?;
    switch.peer.check_health()
}

/// Lets a machine go on whose root is on another machine, by NFS.
#[test]
#[ignore = "long"]
fn a_bare_machine_with_its_root_on_nfs_goes_on_as_a_guest() -> Result<()> {
    need_kvm()?;
    let switch = Switch::boot_with(Kernel::BookwormGeneric, 1)?;
    let spec = as_guest::metal(Kernel::BookwormGeneric, 1).kernel_arg(&format!("lab.nfs={PEER},{MOVING}"));
    let source = boot_on(&switch, spec)?;
    assert_eq!(source.sh("findmnt -no FSTYPE /; findmnt -rno TARGET -t ext4 || true")?, "nfs4");
    start(&source, "reads", READS, "")?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;

    let host = boot_host_on(&switch, &source)?;
    let guest = Guest::start(&host, "--json --console socket --net tap=tap0")?;
    is_well(&guest, &boot_id)?;
    comes_further(&guest, "reads", count(&guest, "reads")? + 1)?;
    assert_eq!(switch.peer.sh("cat /root/after")?, "written");
    guest.check_log()?;
    guest.stop()?;
    switch.peer.check_health()
}

/// Refuses a virtual machine with its disks mounted by all its reasons, and a host without KVM.
#[test]
#[ignore = "long"]
fn each_reason_against_a_guest_is_named() -> Result<()> {
    need_kvm()?;
    let spec = Spec::new(Kernel::BookwormCloud).disk(Bus::Virtio, 2048).qemu_version(Qemu::Newer);
    let machine = Machine::boot(spec)?;
    machine.mercury("checkpoint /dev/vda")?;
    let refused = machine.mercury_refused("restore --as-guest /dev/vda")?;
    assert_eq!(refused.exit, 3, "{refused:?}");
    assert!(refused.text.contains("/dev/kvm"), "{refused:?}");
    machine.sh("modprobe kvm_amd")?;
    let refused = machine.mercury_refused("restore --as-guest /dev/vda")?;
    assert_eq!(refused.exit, 3, "{refused:?}");
    for reason in ["virtio devices on PCI", "mounted"] {
        assert!(refused.text.contains(reason), "{reason}: {refused:?}");
    }
    // A file that is no image is refused as one.
    let refused = machine.mercury_refused("restore --as-guest /etc/passwd")?;
    assert!(refused.text.contains("image"), "{refused:?}");
    assert_eq!(machine.mercury("guests list")?["guests"].as_array().unwrap().len(), 0);
    machine.check_health()
}
