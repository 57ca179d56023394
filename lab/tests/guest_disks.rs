//! Bare machines that go on as guests with their own disks on NVMe (`mercury restore --as-guest --disk
//! nvme0n1=FILE`).

#![allow(clippy::unwrap_used)]

use mercury_lab::{
    Kernel, Machine, Platform, Result, Vendor,
    as_guest::{self, ARTEFACTS, Guest, IMAGE, ROOT},
    restart::{boot_id, count, is_well, script::CLOCK, start},
};

/// Prints each block device with its type, size and mount point, without disks that have no size.
const DISKS: &str = "lsblk -brno NAME,TYPE,SIZE,MOUNTPOINT | sort";
/// Prints everything by which a driver and its users know a disk.
const NAMES: &str = "for disk in /sys/block/nvme*; do grep -qs $1 $disk/device/serial || continue; cd $disk; \
                     echo ${disk##*/}; cat device/serial device/model device/firmware_rev wwid nsid size \
                     queue/logical_block_size; readlink -f device/device; done";

/// Returns the kernel's name of the disk with this serial number.
fn disk(machine: &Machine, serial: &str) -> Result<String> {
    machine.sh(&format!("basename $(dirname $(dirname $(grep -ls {serial} /sys/block/nvme*/device/serial)))"))
}

fn names(serial: &str) -> String {
    format!("set -- {serial}; {NAMES}")
}

/// Boots a machine like metal with its root on NVMe, lets it go on as a guest of another machine with its
/// disks, and checks both.
fn goes_on(kernel: Kernel, cpus: u32) -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")?;
    let source = Machine::boot(as_guest::source_on_nvme(kernel, cpus))?;
    start(&source, "clock", CLOCK, "")?;
    source.sh("echo before > /root/before && sync && head -c 3000000 /dev/urandom > /root/noise")?;
    let noise = source.sh("md5sum < /root/noise")?;
    let (root, tools) = (disk(&source, "mercury-root")?, disk(&source, "mercury-lab")?);
    let identity = source.sh(&names("mercury-root"))?;
    let mounts = source.sh(&format!("{DISKS} | grep -E '^({root}|{tools})'"))?;
    let (boot_id, before) = (boot_id(&source)?, count(&source, "clock")?);
    as_guest::checkpoint(&source)?;

    let host =
        source.boot_in_its_place(as_guest::host_with_disks(Kernel::BookwormCloud, &source, kernel)?)?;
    is_refused_without_its_disks(&host, &root, &tools)?;
    let options = format!("--disk {root}={ROOT} --disk {tools}={ARTEFACTS},ro --console socket");
    let guest = Guest::start(&host, &options)?;
    is_well(&guest, &boot_id)?;
    assert!(count(&guest, "clock")? > before);
    assert_eq!(guest.sh(&format!("{DISKS} | grep -E '^({root}|{tools})'"))?, mounts);
    assert_eq!(guest.sh(&names("mercury-root"))?, identity);
    // What was written before is read from the disk, and not from memory.
    guest.sh("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    assert_eq!(guest.sh("cat /root/before; md5sum < /root/noise")?, format!("before\n{noise}"));
    guest.sh("cp /root/noise /root/copy && rm /root/noise && sync && fstrim -v / || true")?;
    guest.sh("echo 3 > /proc/sys/vm/drop_caches")?;
    assert_eq!(guest.sh("md5sum < /root/copy")?, noise);
    println!("{}", guest.sh("dmesg | tail -60")?);
    guest.check_log()?;
    assert_eq!(guest.sh("dmesg | grep -iE 'nvme.*(timeout|abort|error|fail|unable|changed)' || true")?, "");
    assert_eq!(guest.sh("dmesg | grep -iE '(I/O|EXT4-fs) error' || true")?, "");

    let said = guest.power_off()?;
    assert!(said.contains("powered itself off"), "{said}");
    is_whole(&host, &noise)?;
    host.check_health()
}

/// Checks that the machine is refused without a disk, with another content, and with a disk in use.
fn is_refused_without_its_disks(host: &Machine, root: &str, tools: &str) -> Result<()> {
    host.sh("modprobe kvm_amd")?;
    let refused = |disks: &str, reason: &str| -> Result<()> {
        let refused = host.mercury_refused(&format!("restore --as-guest {IMAGE} {disks}"))?;
        assert!(refused.text.contains(reason), "{reason}: {refused:?}");
        Ok(())
    };
    refused("", &format!("--disk {root}=FILE"))?;
    refused(&format!("--disk {root}={ROOT}"), &format!("--disk {tools}=FILE"))?;
    let other = format!("--disk {root}={ROOT} --disk nvme9n1={ARTEFACTS},ro");
    refused(&other, "no disk nvme9n1")?;
    host.sh(&format!("truncate -s $(blockdev --getsize64 {ROOT}) /run/other"))?;
    let other = format!("--disk {root}=/run/other --disk {tools}={ARTEFACTS},ro");
    refused(&other, "not what it was at the instant")?;
    host.sh(&format!("rm /run/other; mount -o ro,noload {ROOT} /mnt"))?;
    refused(&format!("--disk {root}={ROOT} --disk {tools}={ARTEFACTS},ro"), "busy")?;
    host.sh("umount /mnt").map(drop)
}

/// Checks the root disk of a guest that has ended.
fn is_whole(host: &Machine, noise: &str) -> Result<()> {
    println!("{}", host.sh(&format!("fsck.ext4 -fn {ROOT}"))?);
    host.sh(&format!("mount -o ro {ROOT} /mnt"))?;
    let found = host.sh("cd /mnt/root && cat before after && md5sum < copy && test ! -e noise")?;
    assert_eq!(found, format!("before\nwritten\n{noise}"));
    host.sh("umount /mnt").map(drop)
}

#[test]
#[ignore = "long"]
fn a_machine_with_its_root_on_nvme_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::BookwormGeneric, 1)
}
