//! Common parts of the checkpoint tests: a machine with a disk for the image, and a cable to
//! another one.

use std::net::TcpListener;

use mercury_lab::{
    Boot, Bus, Kernel, Machine, Platform, Qemu, Result, Spec, Variant, Vendor,
    restart::{self, Folder, knows_the_time, results},
};
use serde_json::{Value, json};

/// The disk for images: the only one on this bus.
pub const DISK: &str = "/dev/vda";

pub fn spec(kernel: Kernel) -> Spec {
    with_disk(Spec::new(kernel))
}

/// Adds a disk for an image.
pub fn with_disk(spec: Spec) -> Spec {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    spec.disk(Bus::Virtio, 2048).modules(Variant::Faults).qemu_version(Qemu::Newer)
}

/// Skips the test in Bochs. Its SVM forgets interrupts whose delivery makes a nested fault, and its
/// other machines have no spare disk.
pub fn need_qemu() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    Platform::need(Vendor::Amd, "Bochs has no disk for the image")?;
    Platform::need(Vendor::Intel, "this SVM reports no interrupts in delivery")
}

/// Returns the system that restores the machine, as the machine's own command prepares it.
pub fn prepare(machine: &Machine, more: &str) -> Result<(Boot, Folder)> {
    restart::prepare(machine, DISK, more)
}

/// Writes the machine to the image's disk. The machine is off in the end, and the disks are as they
/// were at the instant.
pub fn checkpoint(machine: &Machine) -> Result<()> {
    checkpoint_to(machine, DISK)
}

/// Writes the machine to another image.
pub fn checkpoint_to(machine: &Machine, image: &str) -> Result<()> {
    knows_the_time(machine, "before")?;
    restart::checkpoint(machine, "", image)
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap().port()
}

/// Adds one end of a cable between two machines.
pub fn wired(spec: Spec, port: u16, end: &str) -> Spec {
    let last = if end == "listen" { 1 } else { 2 };
    let card = format!("virtio-net-pci,netdev=cable,romfile=,mac=52:54:00:09:00:0{last}");
    let netdev = format!("socket,id=cable,{end}=127.0.0.1:{port}");
    ["-netdev", &netdev, "-device", &card].into_iter().fold(spec, Spec::qemu_arg)
}

pub fn plug_in(machine: &Machine, address: &str) -> Result<()> {
    machine.sh("modprobe virtio_net")?;
    let card = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1)";
    machine.sh(&format!("{card}; ip address add {address}/24 dev $card && ip link set $card up")).map(drop)
}

/// Plugs a DIMM of 128 MiB into a running machine.
pub fn plug_dimm_in(machine: &Machine, id: &str) -> Result<()> {
    let qmp = machine.qmp()?;
    let memory = format!("{id}-memory");
    qmp.execute("object-add", json!({"qom-type": "memory-backend-ram", "id": memory, "size": 128 << 20}))?;
    qmp.execute("device_add", json!({"driver": "pc-dimm", "id": id, "memdev": memory})).map(drop)
}

/// Plugs a DIMM of 128 MiB into a running machine, where it stays, and waits until the kernel uses it.
pub fn plug_memory_in(machine: &mut Machine, id: &str) -> Result<()> {
    let total = |machine: &Machine| machine.sh("awk '/MemTotal/ {print $2}' /proc/meminfo");
    let before: u64 = total(machine)?.parse().unwrap();
    plug_dimm_in(machine, id)?;
    let grown = format!("test $(awk '/MemTotal/ {{print $2}}' /proc/meminfo) -ge {}", before + (128 << 10));
    machine.sh(&format!("for i in $(seq 300); do {grown} && exit; sleep 0.1; done; exit 1"))?;
    let arguments = Spec::dimm_arguments(id);
    machine.keep_plugged(&arguments.each_ref().map(String::as_str));
    Ok(())
}

/// Returns a script for while everything is frozen. From then on `copies` gets the contents of
/// `disk`, the origin of `device`, before they are overwritten.
pub fn snapshot_of(device: &str, disk: &str, copies: &str) -> String {
    format!(
        "set -e\n\
         sectors=$(blockdev --getsz {disk})\n\
         dmsetup suspend --nolockfs --noudevsync {device}\n\
         dmsetup create frozen --noudevsync --table \"0 $sectors snapshot {disk} {copies} P 16\"\n\
         dmsetup resume --noudevsync {device}\n"
    )
}

/// Checks that every sum of pgbench's is right.
pub fn balances_agree(machine: &Machine) -> Result<()> {
    let sums = "select (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from \
                pgbench_branches), (select sum(tbalance) from pgbench_tellers), \
                (select sum(delta) from pgbench_history)";
    let sums = machine.sh(&format!("psql -At bench -c '{sums}'"))?;
    let mut different: Vec<_> = sums.split('|').collect();
    different.dedup();
    assert_eq!(different.len(), 1, "{sums}");
    Ok(())
}

/// Workloads that would notice a changed register. The last one's registers are armed whatever task
/// runs. The newer QEMU misses an execution breakpoint now and then, so there is none.
const REGISTERS: [(&str, &str); 5] = [
    ("fpu", "fpu"),
    ("flags", "flags"),
    ("sampling", "sampling"),
    ("breakpoint", "breakpoint --stores"),
    ("held", "breakpoint --held"),
];

/// Fills registers with known values, in processes that the agent does not wait for.
pub fn hold_registers(machine: &Machine) -> Result<()> {
    REGISTERS.iter().try_for_each(|(name, words)| {
        let work = format!("mercury-workload --until-file /run/end {words} > /run/{name} 2>&1");
        machine
            .sh(&format!("setsid sh -c '{work}; mv /run/{name} /run/{name}.ended' < /dev/null &"))
            .map(drop)
    })
}

/// Checks that no workload has noticed a change.
pub fn registers_were_held(machine: &Machine) -> Result<()> {
    let names = REGISTERS.map(|(name, _)| name);
    for (name, said) in names.iter().zip(results(machine, &names)?) {
        println!("{name}: {said}");
        let report: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        assert_eq!(report["violations"], 0, "{name}: {said}");
        assert!(report["passes"].as_u64() > Some(0), "{name}: {said}");
    }
    Ok(())
}

/// Another network namespace, connected with this one by a cable, by security associations of IPsec
/// in both, and by TCP.
const ENCRYPTED: &str = r"
set -e
modprobe -a veth xfrm_user
ip netns add far
ip link add near type veth peer name end netns far
ip address add 10.77.0.1/24 dev near
ip -n far address add 10.77.0.2/24 dev end
ip link set near up
ip -n far link set end up
for netns in /proc/self/ns/net /run/netns/far; do
    nsenter --net=$netns ip xfrm state add src 10.77.0.1 dst 10.77.0.2 proto esp spi 0x100 mode transport \
        aead 'rfc4106(gcm(aes))' 0x000102030405060708090a0b0c0d0e0f10111213 128
done
";

/// A program that reports the fate of its TCP connection. Its argument names its end.
const CONNECTED: &str = r#"
import socket, sys, time
if sys.argv[1] == "far":
    server = socket.create_server(("10.77.0.2", 7000))
    open("/run/listens", "w").write("yes")
    end, _ = server.accept()
else:
    end = socket.create_connection(("10.77.0.2", 7000))
    open("/run/connected", "w").write("yes")
try:
    while True:
        end.sendall(b"x")
        time.sleep(0.05)
except OSError as error:
    open("/run/ended." + sys.argv[1], "w").write(error.strerror)
"#;

/// Sets up [`ENCRYPTED`], with a TCP connection.
pub fn encrypt(machine: &Machine) -> Result<()> {
    machine.sh(ENCRYPTED)?;
    machine.put("/run/connected.py", CONNECTED.as_bytes(), 0o644)?;
    let start = |line: &str| machine.sh(&format!("setsid {line} > /dev/null 2>&1 < /dev/null &"));
    start("ip netns exec far python3 /run/connected.py far")?;
    machine.sh("until test -e /run/listens; do sleep 0.1; done")?;
    start("python3 /run/connected.py near")?;
    machine.sh("until test -e /run/connected; do sleep 0.1; done").map(drop)
}

/// Checks that the second life reuses no key with a counter of the first one, which went on from
/// the instant.
pub fn nothing_is_encrypted_twice(machine: &Machine) -> Result<()> {
    assert_eq!(machine.sh("ip xfrm state; ip -n far xfrm state")?, "");
    let ended =
        "for i in $(seq 50); do test -s /run/ended.near && test -s /run/ended.far && break; sleep 0.1; done";
    let said = machine.sh(&format!("{ended}; cat /run/ended.near; echo; cat /run/ended.far"))?;
    assert_eq!(said, "Software caused connection abort\nSoftware caused connection abort");
    machine.sh("ping -c 1 -W 5 10.77.0.2").map(drop)
}

/// A process whose memory is swapped out until the test tells it to read it.
pub const SWAPPED: &str = r#"
import hashlib, mmap, os, time
memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:] = os.urandom(8 << 20)
before = hashlib.sha256(memory).digest()
MADV_PAGEOUT = 21
memory.madvise(MADV_PAGEOUT)
say(1)
while not os.path.exists("/run/look"):
    time.sleep(0.1)
say(2 if hashlib.sha256(memory).digest() == before else 3)
"#;
