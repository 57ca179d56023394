//! Machines that move with file systems on disks that both ends reach: a disk of both machines, and
//! disks by connections of the machine's kernel.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use mercury_lab::{
    Kernel, Machine, Result, Spec,
    moving::{PEER, Switch, migrate, receive},
    restart::{
        comes_further, count,
        script::{ATTACH_BLOCKS, BLOCKS},
        start,
    },
};
use workloads::{
    moves::{Scene, fails, moves, moves_by},
    number,
    restart::{SWAPPED, need_qemu},
};

/// A disk of several machines, which goes when this value is dropped.
struct SharedDisk(PathBuf);

impl SharedDisk {
    fn new(mib: u64) -> Self {
        let path = std::env::temp_dir().join(format!("mercury-shared-disk-{}", process::id()));
        File::create(&path).unwrap().set_len(mib << 20).unwrap();
        Self(path)
    }

    fn plugged(&self, spec: Spec) -> Spec {
        let drive = format!("if=none,id=shared,format=raw,file.locking=off,file={}", self.0.display());
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=shared,share-rw=on"]
            .into_iter()
            .fold(spec, Spec::qemu_arg)
    }
}

impl Drop for SharedDisk {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A program that has each number on the disk before the next.
const LEDGER: &str = "
import os, sys, time
count = 0
with open(sys.argv[1], 'ab') as ledger:
    while True:
        ledger.write(b'%d\\n' % count)
        ledger.flush()
        os.fsync(ledger.fileno())
        count += 1
        say(count)
        time.sleep(0.02)
";

/// Checks that no number is missing, and none is there twice.
fn is_right(machine: &Machine, ledger: &str) -> Result<()> {
    let counted = machine.sh(&format!(
        "pkill -f '[p]ython3.* {ledger}'; sleep 1; lines=$(wc -l < {ledger}); test $lines -gt 5 && \
         seq 0 $((lines - 1)) | cmp - {ledger} && echo $lines numbers in {ledger}"
    ))?;
    print!("{counted}");
    Ok(())
}

/// Takes along a file system on a disk of both machines. If another system writes to the disk after
/// the instant, the machine does not go.
#[test]
#[ignore = "long"]
fn a_disk_that_both_reach_goes_along() -> Result<()> {
    need_qemu()?;
    let disk = SharedDisk::new(64);
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::changed(Kernel::BookwormCloud, 2, [768; 2], |spec| disk.plugged(spec))?;
    machine.sh(
        "modprobe virtio_blk; mkfs.ext4 -q /dev/vda && mkdir -p /run/shared && mount /dev/vda /run/shared",
    )?;
    start(machine, "ledger", LEDGER, "/run/shared/ledger")?;
    let words = receive(destination, "10.9.0.3")?;
    let (stop, file) = (AtomicBool::new(false), File::options().write(true).open(&disk.0).unwrap());
    thread::scope(|scope| {
        // The first bytes belong to no file system: a boot loader could be there.
        scope.spawn(|| {
            for count in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(&count.to_le_bytes(), 0).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        let refused = fails(
            peer,
            machine,
            &migrate(&words, "--rounds 1"),
            &["the disks here are not as they were", "was written to after the instant"],
        );
        stop.store(true, Ordering::Relaxed);
        refused
    })?;
    comes_further(machine, "ledger", count(machine, "ledger")?)?;
    moves_by(peer, machine, destination, &words, "--rounds 2")?;
    comes_further(destination, "ledger", count(destination, "ledger")? + 5)?;
    is_right(destination, "/run/shared/ledger")?;
    println!("{}", destination.sh("umount /run/shared && e2fsck -f -n /dev/vda 2>&1")?);
    destination.check_next_attach()
}

/// A disk of the switch, by NVMe over TCP.
const NVME_TARGET: &str = "modprobe -a nvmet nvmet-tcp; mountpoint -q /sys/kernel/config || mount -t \
     configfs none /sys/kernel/config; cd /sys/kernel/config/nvmet; truncate -s 64M /run/nvme; mkdir \
     subsystems/shared subsystems/shared/namespaces/1 ports/1; echo 1 > \
     subsystems/shared/attr_allow_any_host; cd subsystems/shared/namespaces/1; echo -n /run/nvme > \
     device_path; echo 1 > buffered_io; echo 1 > enable; cd ../../../../ports/1; echo ipv4 > addr_adrfam; \
     echo tcp > addr_trtype; echo 10.9.0.1 > addr_traddr; echo 4420 > addr_trsvcid; \
     ln -s ../../subsystems/shared subsystems/shared";
const NVME_CONNECT: &str = "modprobe nvme-tcp; echo transport=tcp,traddr=10.9.0.1,trsvcid=4420,nqn=shared > \
     /dev/nvme-fabrics; for i in $(seq 100); do name=$(grep -lx shared /sys/block/nvme*/device/subsysnqn | \
     cut -d/ -f4 | grep -v c) && test -e /dev/$name && break; sleep 0.1; done; \
     test -e /dev/$name && echo -n /dev/$name";

/// Gives the machine two disks by connections of its kernel: /dev/nbd0, and one over NVMe. Returns the
/// name of the second.
fn connect_disks(peer: &Machine, machine: &Machine) -> Result<String> {
    start(peer, "blocks", BLOCKS, "")?;
    peer.sh(NVME_TARGET)?;
    machine.sh("modprobe nbd nbds_max=2")?;
    start(machine, "attach_blocks", ATTACH_BLOCKS, PEER)?;
    machine.sh("while pgrep -f '[a]ttach_blocks'; do sleep 0.1; done")?;
    machine.sh(NVME_CONNECT)
}

/// Takes along file systems on disks that the machine has by connections of its kernel, with the
/// connections.
#[test]
#[ignore = "long"]
fn disks_on_a_network_go_along() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let nvme = connect_disks(peer, machine)?;
    for (name, disk) in [("blocks_ledger", "/dev/nbd0"), ("nvme_ledger", &nvme)] {
        machine.sh(&format!(
            "mkfs.ext4 -q {disk} && mkdir -p /run/{name}.d && mount {disk} /run/{name}.d && dmesg | tail -3"
        ))?;
        start(machine, name, LEDGER, &format!("/run/{name}.d/ledger"))?;
    }
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2")?;
    for (name, disk) in [("blocks_ledger", "/dev/nbd0"), ("nvme_ledger", &nvme)] {
        println!("{name}: {}", count(destination, name)?);
        if let Err(error) = comes_further(destination, name, count(destination, name)? + 5) {
            println!("{}", destination.sh("dmesg | tail -40")?);
            return Err(error);
        }
        is_right(destination, &format!("/run/{name}.d/ledger"))?;
        println!("{}", destination.sh(&format!("umount /run/{name}.d && e2fsck -f -n {disk} 2>&1"))?);
    }
    destination.check_next_attach()
}

/// Takes along swap on an array of two disks that the kernel has by connections. The array is being
/// checked, and memory is swapped out to it.
#[test]
#[ignore = "long"]
fn swap_on_an_array_of_network_disks_goes_along() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    let nvme = connect_disks(peer, machine)?;
    machine.sh(&format!(
        "modprobe raid1; mdadm --create /dev/md0 --run --level=1 --metadata=1.2 --assume-clean \
         --raid-devices=2 /dev/nbd0 {nvme}; mkswap -q /dev/md0; swapon -p 7 /dev/md0"
    ))?;
    start(machine, "swapped", SWAPPED, "")?;
    let used = machine.sh("awk 'NR > 1 { print $4, $5 }' /proc/swaps")?;
    assert!(used.ends_with(" 7") && !used.starts_with("0 "), "{used}");
    machine.sh(
        "cd /sys/block/md0/md; echo 10 > sync_speed_min; echo 20 > sync_speed_max; echo check > sync_action",
    )?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2")?;
    let swaps = "awk 'NR > 1 { print $1, $5 }' /proc/swaps";
    let array = "cd /sys/block/md0/md; cat degraded sync_action";
    assert_eq!(destination.sh(&format!("{swaps}; {array}"))?, "/dev/md0 7\n0\ncheck");
    destination.sh("touch /run/look; until grep -q '[23]' /run/swapped; do sleep 0.1; done")?;
    assert_eq!(number(destination, "/run/swapped")?, 2);
    destination.sh("swapoff /dev/md0; echo idle > /sys/block/md0/md/sync_action; mdadm --stop /dev/md0")?;
    destination.check_next_attach()
}

/// Takes along memory in a slot, which the firmware's memory map does not list.
#[test]
#[ignore = "long"]
fn memory_in_a_slot_goes_along() -> Result<()> {
    need_qemu()?;
    let slot = |spec: Spec| spec.memory_slots().dimm("first");
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::changed(Kernel::BookwormCloud, 2, [896; 2], slot)?;
    machine.sh("head -c 300M /dev/urandom > /dev/shm/file")?;
    let sum = machine.sh("sha256sum /dev/shm/file")?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2")?;
    assert_eq!(destination.sh("sha256sum /dev/shm/file")?, sum);
    destination.check_next_attach()
}
