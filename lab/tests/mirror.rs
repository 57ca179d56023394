//! Disks that are copied while they are written to, by the driver's dirty log of the disk, which
//! must miss nothing.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{thread, time::Duration};

use mercury_lab::{
    Bus, Kernel, Machine, Qemu, Result, Spec,
    driver::Variant,
    moving::{MOVING, PEER, Switch, migrate, plug_in, receive_with, wait_more},
    restart::{
        comes_further, count, nothing_wrong,
        script::{CLOCK, HEAR, TALK},
        start,
    },
};
use workloads::{
    moves::{COMES, goes_on, moves_by},
    restart::need_qemu,
};

const LIMIT: Duration = Duration::from_secs(300);

/// A program that divides a disk of 256 MiB into two.
const DIVIDE: &str = r#"
import fcntl, os, struct, sys
disk = os.open(sys.argv[1], os.O_RDWR)
entry = lambda start, count: struct.pack("<B3sB3sII", 0, bytes(3), 0x83, bytes(3), start, count)
os.write(disk, bytes(446) + entry(2048, 262144) + entry(264192, 260096) + bytes(32) + b"\x55\xaa")
os.fsync(disk)
BLKRRPART = 0x125f
fcntl.ioctl(disk, BLKRRPART)
"#;

/// A script that makes a file system on the first part of a disk. Nothing is on the second part.
const PREPARE: &str = "python3 /run/divide.py $disk; sleep 1; set -- $(ls $disk?*); modprobe -q btrfs || \
     true; if command -v mkfs.ext4; then mkfs.ext4 -q $1; else mkfs.btrfs -q $1; fi; \
     mkdir -p /run/mnt && mount -o discard $1 /run/mnt";

/// A script that writes, synchronises, renames and removes files, and discards their blocks.
const FILES: &str = "cd /run/mnt; n=0; while test ! -e /run/end; do n=$((n + 1)); \
     dd if=/dev/urandom of=new bs=8k count=$((n % 60 + 1)) conv=fsync status=none && mv new file$((n % 9)); \
     head -c 3000000 /dev/zero > lazy; test $((n % 7)) != 0 || { rm -f file*; fstrim .; }; done";

/// A program that writes to the second part past all caches and through them, zeroes it, and writes
/// by a raw command.
const RAW: &str = r#"
import ctypes, fcntl, mmap, os, random, struct, subprocess, sys, time
path = sys.argv[1]
direct = os.open(path, os.O_RDWR | os.O_DIRECT)
cached = os.open(path, os.O_RDWR)
end = os.lseek(cached, 0, os.SEEK_END)
page = mmap.mmap(-1, 65536)
count = 0
while not os.path.exists("/run/still"):
    count += 1
    length = random.choice([4096, 8192, 65536])
    page[:length] = os.urandom(length)
    at = random.randrange((end - 65536) // 4096) * 4096
    os.pwritev(direct, [memoryview(page)[:length]], at)
    os.pwrite(cached, os.urandom(100), random.randrange(end - 100))
    if count % 50 == 0:
        subprocess.run(["blkdiscard", "-f", "-z", "-o", str(at), "-l", "65536", path], check=True)
    if count % 70 == 0:
        subprocess.run(["blkdiscard", "-f", "-o", str(at), "-l", "65536", path], check=False)
    if "nvme" in path and count % 90 == 0:
        # struct nvme_passthru_cmd: Write, of one block.
        start = int(open("/sys/class/block/%s/start" % os.path.basename(path)).read())
        number = random.randrange(end // 512 - 1) + start
        memory = ctypes.create_string_buffer(os.urandom(512), 512)
        command = bytearray(struct.pack(
            "<BBHIIIQQIIIIIIIIII", 1, 0, 0, 1, 0, 0, 0, ctypes.addressof(memory), 0, 512,
            number & 0xffffffff, number >> 32, 0, 0, 0, 0, 0, 0))
        fcntl.ioctl(os.open(path[:-2], os.O_RDWR), 0xc0484e43, command)
    if count % 20 == 0:
        time.sleep(0.02)
os.fsync(cached)
print("writes", count)
"#;

/// Copies one of a machine's disks to another, and checks that they are equal in the end.
fn is_copied(machine: &Machine, disk: &str, to: &str) -> Result<()> {
    machine.sh("rm -f /run/still /run/end /run/go")?;
    machine.sh(&format!("disk={disk}; {PREPARE}"))?;
    let part = machine.sh(&format!("ls {disk}?* | tail -1"))?;
    let files = machine.spawn(FILES)?;
    let raw = machine.spawn(&format!("python3 /run/raw.py {part}"))?;
    // Writes before the log's beginning are reported by no one.
    machine.sh("sleep 1")?;
    let mut copy =
        machine.spawn(&format!("mercury-workload disk {disk} {to} --wait-file /run/go --freeze /run/mnt"))?;
    copy.wait_output("it has been copied", LIMIT)?;
    machine.sh("touch /run/still")?;
    let raw = raw.wait(LIMIT)?.check()?;
    machine.sh("touch /run/go")?;
    let output = copy.wait(LIMIT)?.check()?;
    println!("{disk}: {} {}", raw.stdout.trim(), output.stdout);
    let fact = |name: &str| -> u64 {
        let report: serde_json::Value = serde_json::from_str(output.stdout.lines().last().unwrap()).unwrap();
        report[name].as_u64().unwrap_or_else(|| panic!("{name} is not in {report}"))
    };
    assert_eq!(fact("missed_chunks"), 0);
    assert!(fact("logged_chunks") > 50 && fact("last_chunks") > 0, "{}", output.stdout);
    machine.sh("touch /run/end")?;
    files.wait(LIMIT)?.check()?;
    machine.sh("umount /run/mnt").map(drop)
}

fn machine(kernel: Kernel, buses: &[Bus]) -> Result<Machine> {
    let spec = Spec::new(kernel).cpus(2).modules(Variant::Faults).qemu_version(Qemu::Newer);
    // The last disk is the target of the copies.
    let spec = buses.iter().fold(spec, |spec, bus| spec.disk(*bus, 256)).disk(Bus::Virtio, 256);
    let machine = Machine::boot(spec)?;
    machine.sh("mercury load")?;
    machine.put("/run/raw.py", RAW.as_bytes(), 0o644)?;
    machine.put("/run/divide.py", DIVIDE.as_bytes(), 0o644)?;
    Ok(machine)
}

/// Checks the refusals, and that nothing remains: the module is removed, and loaded again.
fn leaves_nothing(machine: &Machine, disk: &str) -> Result<()> {
    machine.sh("mercury unload && ! lsmod | grep '^mercury ' && ! dmesg | grep -E 'Oops|BUG:|WARNING: \
            CPU' && mercury load")?;
    // The driver's probes are removed with it.
    machine.sh(&format!("dd if=/dev/zero of={disk} bs=1M count=1 oflag=direct status=none")).map(drop)
}

#[test]
#[ignore = "long"]
fn disks_of_each_class_are_copied_while_they_are_written_to() -> Result<()> {
    let machine = machine(Kernel::BookwormGeneric, &[Bus::Virtio, Bus::Nvme, Bus::Ahci])?;
    machine.sh("modprobe -a virtio_blk nvme ahci sd_mod")?;
    // The artefacts and the root are on NVMe, too.
    for id in ["disk0", "disk1", "disk2"] {
        let named = |id: &str| {
            let line = format!(
                "for disk in $(lsblk -dno NAME); do grep -qs mercury-{id} /sys/block/$disk/serial \
                 /sys/block/$disk/device/serial /sys/block/$disk/device/vpd_pg80 && echo /dev/$disk || true; \
                 done"
            );
            machine.sh(&line)
        };
        let (from, to) = (named(id)?, named("disk3")?);
        is_copied(&machine, &from, &to)?;
        leaves_nothing(&machine, &from)?;
    }
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn a_disk_is_copied_while_it_is_written_to_on_a_later_kernel() -> Result<()> {
    let machine = machine(Kernel::TrixieCloud, &[Bus::Virtio])?;
    is_copied(&machine, "/dev/vda", "/dev/vdb")?;
    leaves_nothing(&machine, "/dev/vda")?;
    machine.check_next_attach()
}

/// The disk with the root file system.
const ROOT: &str = "/dev/nvme0n1";

/// A program that writes files with known content, synchronises them, and later reads them from the
/// disk again.
const WRITES: &str = r#"
import hashlib
os.makedirs("/root/work", exist_ok=True)
FILES, count = 40, 0
def content(number):
    return hashlib.sha256(str(number).encode()).digest() * 3000
while True:
    file = os.open(f"/root/work/{count % FILES}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(file, content(count))
    os.fsync(file)
    os.close(file)
    count += 1
    if count >= FILES:
        file = os.open(f"/root/work/{count % FILES}", os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.read(file, 1 << 20) != content(count - FILES):
            wrong(f"file {count % FILES} is not what it was")
        os.close(file)
    say(count)
"#;

/// A command that hashes some of the machine's own files, read from the disk.
const SUM: &str = "sync; echo 3 > /proc/sys/vm/drop_caches; cat /usr/bin/[a-f]* | sha256sum";

/// Starts `mercury receive`, and offers the destination's own disk.
fn receive(destination: &Machine, address: &str) -> Result<String> {
    receive_with(destination, address, &format!("--delay 4s --disk {ROOT} --force-disk"))
}

/// Calls the move off by Ctrl-C after a part of the disk has come. The machine is unchanged, and
/// the destination reports that its disk holds nothing.
fn is_called_off(peer: &Machine, machine: &Machine, destination: &Machine, words: &str) -> Result<()> {
    let mut moving = machine.spawn(&migrate(words, &format!("--with-disk {ROOT} --bandwidth 10")))?;
    wait_more(destination, COMES, 0)?;
    thread::sleep(Duration::from_secs(15));
    assert!(!moving.has_ended()?);
    moving.kill(2)?;
    let output = moving.wait(LIMIT)?;
    assert!(output.stderr.contains("interrupted: the machine has not moved"), "{}", output.stderr);
    wait_more(
        destination,
        "holds a part of a machine that did not arrive completely; its beginning is zeros now",
        0,
    )?;
    goes_on(peer, machine)?;
    comes_further(machine, "writes", count(machine, "writes")? + 45)
}

/// Moves the machine with its root's disk to the destination, whose own system is overwritten.
fn moves_with_its_disk(peer: &Machine, machine: &Machine, destination: &Machine, words: &str) -> Result<()> {
    let sum = machine.sh(SUM)?;
    moves_by(peer, machine, destination, words, &format!("--with-disk {ROOT} --max-throttle 0"))?;
    for work in ["talk", "hear", "writes"] {
        // Every file has been read again by then.
        comes_further(destination, work, count(destination, work)? + 45)?;
    }
    nothing_wrong(peer)?;
    nothing_wrong(destination)?;
    assert_eq!(destination.sh(SUM)?, sum, "files are not what they were");
    // A frozen file system has no write under way, and its journal is empty. For one that is
    // mounted at / e2fsck would ask whether it can be written to, and wait for ever. Another name
    // for the disk avoids that.
    destination.sh(&format!(
        "modprobe loop; disk=$(losetup -r -f --show {ROOT}) && fsfreeze -f / && \
         {{ e2fsck -fn $disk > /run/fsck 2>&1; echo $? > /run/code; fsfreeze -u /; losetup -d $disk; }}"
    ))?;
    let (code, output) = (destination.sh("cat /run/code")?, destination.sh("cat /run/fsck")?);
    assert_eq!(code, "0", "{output}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_machine_moves_with_its_disk_and_comes_back() -> Result<()> {
    need_qemu()?;
    let switch = Switch::boot()?;
    let peer = &switch.peer;
    let machine = switch.boot_other(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&machine, MOVING)?;
    let destination = switch.boot_other(switch.plugged(Kernel::BookwormCloud, 2, 768, 3))?;
    plug_in(&destination, "10.9.0.3")?;
    start(&machine, "clock", CLOCK, "")?;
    start(&machine, "talk", TALK, PEER)?;
    start(&machine, "hear", HEAR, "")?;
    start(&machine, "writes", WRITES, "")?;
    switch.tell()?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    let refused = destination.run(&format!("mercury receive --listen 10.9.0.3 --disk {ROOT}"))?;
    assert!(!refused.success() && refused.stderr.contains("/ is mounted from it"), "{}", refused.stderr);
    let words = receive(&destination, "10.9.0.3")?;
    is_called_off(peer, &machine, &destination, &words)?;
    moves_with_its_disk(peer, &machine, &destination, &words)?;
    let repaired = machine.start_as(switch.plugged(Kernel::BookwormCloud, 2, 768, 2))?;
    plug_in(&repaired, "10.9.0.4")?;
    let words = receive(&repaired, "10.9.0.4")?;
    moves_with_its_disk(peer, &destination, &repaired, &words)?;
    repaired.check_next_attach()
}
