//! Bare machines that go on as guests with their own disks on NVMe and AHCI (`mercury restore --as-guest
//! --disk nvme0n1=FILE`).

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use mercury_lab::{
    Bus, Kernel, Machine, Platform, Result, Vendor,
    as_guest::{self, ARTEFACTS, DATA, Guest, IMAGE, ROOT, disk},
    restart::{boot_id, count, is_well, script::CLOCK, start},
};

/// Prints each block device with its type, size and mount point, without disks that have no size.
const DISKS: &str = "lsblk -brno NAME,TYPE,SIZE,MOUNTPOINT | sort";
/// Prints everything by which a driver and its users know a disk.
const NAMES: &str = "for disk in /sys/block/nvme*; do grep -qs $1 $disk/device/serial || continue; cd $disk; \
                     echo ${disk##*/}; cat device/serial device/model device/firmware_rev wwid nsid size \
                     queue/logical_block_size; readlink -f device/device; done";

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

/// Ext4 on LVM on LUKS, and a process that writes there.
const VOLUMES: &str = r"
set -e
export DM_DISABLE_UDEV=1
modprobe -a dm-crypt dm-mod
echo a secret | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $1 -
echo a secret | cryptsetup open --key-file - $1 safe
pvcreate -q /dev/mapper/safe
vgcreate -q group /dev/mapper/safe
lvcreate -q -Zn -l 16 -n data group
mkfs.ext4 -q /dev/mapper/group-data
mkdir -p /data
mount /dev/mapper/group-data /data
setsid sh -c 'n=0
	while sleep 0.2; do n=$((n+1)); echo $n >> /data/lines; sync -d /data/lines; done' > /dev/null 2>&1 &
sleep 2
";

/// Lets a machine with volumes on a disk of their own go on as a guest with all its disks.
fn goes_on_with_volumes() -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")?;
    let kernel = Kernel::BookwormGeneric;
    let source = Machine::boot(as_guest::source_on_nvme(kernel, 1).disk(Bus::Nvme, 256))?;
    let [root, tools, data] = ["root", "lab", "disk1"].map(|one| disk(&source, &format!("mercury-{one}")));
    let (root, tools, data) = (root?, tools?, data?);
    let volumes = format!("set -- /dev/{data}\n{VOLUMES}");
    source.command(&volumes).timeout(Duration::from_secs(180)).run()?.check()?;
    start(&source, "clock", CLOCK, "")?;
    let tables = source.sh("dmsetup table; lsblk -no NAME,TYPE,MOUNTPOINT | grep -A1 crypt")?;
    let boot_id = boot_id(&source)?;
    as_guest::checkpoint(&source)?;

    let host =
        source.boot_in_its_place(as_guest::host_with_disks(Kernel::BookwormCloud, &source, kernel)?)?;
    let options = format!("--disk {root}={ROOT} --disk {tools}={ARTEFACTS},ro --disk {data}={DATA}");
    let guest = Guest::start(&host, &format!("{options} --console socket"))?;
    is_well(&guest, &boot_id)?;
    assert_eq!(guest.sh("dmsetup table; lsblk -no NAME,TYPE,MOUNTPOINT | grep -A1 crypt")?, tables);
    let lines = |guest: &Guest<'_>| guest.sh("wc -l < /data/lines").map(|text| text.parse::<u64>().unwrap());
    let before = lines(&guest)?;
    guest.sh("sleep 3; echo 3 > /proc/sys/vm/drop_caches; awk '$1 != NR { exit 1 }' /data/lines")?;
    assert!(lines(&guest)? > before);
    guest.check_log()?;
    // A power cut: the journal of the disk is whole.
    guest.stop()?;
    host.sh("modprobe -a dm-crypt dm-mod ext4; echo a secret | cryptsetup open --key-file - /dev/vdd safe")?;
    host.sh("export DM_DISABLE_UDEV=1; vgchange -q -ay group && mount /dev/mapper/group-data /mnt")?;
    let written: u64 = host.sh("awk '$1 != NR { exit 1 } END { print NR }' /mnt/lines")?.parse().unwrap();
    assert!(written > before, "{written} of {before} lines");
    host.sh("umount /mnt && vgchange -q -an group && cryptsetup close safe")?;
    host.check_health()
}

/// Prints everything by which a driver and its users know the disk `sda`.
const SATA: &str = "cd /sys/block/sda; readlink -f device; cat device/model device/rev device/vpd_pg80 \
                    device/queue_depth device/wwid size queue/logical_block_size queue/write_cache";
/// Prints errors of its port.
const SATA_ERRORS: &str = "port=$(readlink -f /sys/block/sda | grep -o 'ata[0-9]*'); dmesg | \
                           grep -E \"$port.*(failed|exception|error|timeout|revalid)|I/O error\" || true";
/// Writes and reads past the page cache, with many commands in the queue.
const LOAD: &str = "for n in 1 2 3 4; do dd if=/root/noise of=/root/load$n bs=64k oflag=direct conv=fsync & \
                    done; wait; \
                    for n in 1 2 3 4; do cmp /root/noise /root/load$n || exit 1; rm /root/load$n; done";

/// Boots a machine like metal with its root on AHCI, lets it go on as a guest of another machine with its
/// disks, and checks both.
fn goes_on_with_ahci(kernel: Kernel, cpus: u32) -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")?;
    let spec = as_guest::source_on_nvme(kernel, cpus).root_bus(Bus::Ahci);
    // A drive without a medium, at a port of its own.
    let source = Machine::boot(spec.qemu_arg("-device").qemu_arg("ide-cd,bus=sata.4"))?;
    start(&source, "clock", CLOCK, "")?;
    source.sh("echo before > /root/before && sync && head -c 3000000 /dev/urandom > /root/noise")?;
    let noise = source.sh("md5sum < /root/noise")?;
    let tools = disk(&source, "mercury-lab")?;
    let identity = source.sh(SATA)?;
    let mounts = source.sh(&format!("{DISKS} | grep ^sda"))?;
    let (boot_id, before) = (boot_id(&source)?, count(&source, "clock")?);
    as_guest::checkpoint(&source)?;

    let host =
        source.boot_in_its_place(as_guest::host_with_disks(Kernel::BookwormCloud, &source, kernel)?)?;
    host.sh("modprobe kvm_amd")?;
    let refused = host.mercury_refused(&format!("restore --as-guest {IMAGE}"))?;
    assert!(refused.text.contains("serial number mercury-root") && refused.text.contains("--disk sda=FILE"));
    let options = format!("--disk sda={ROOT} --disk {tools}={ARTEFACTS},ro --console socket");
    let guest = Guest::start(&host, &options)?;
    is_well(&guest, &boot_id)?;
    assert!(count(&guest, "clock")? > before);
    assert_eq!(guest.sh(&format!("{DISKS} | grep ^sda"))?, mounts);
    println!("{}", guest.sh("dmesg | tail -60")?);
    assert_eq!(guest.sh(SATA)?, identity);
    guest.sh("sync; echo 3 > /proc/sys/vm/drop_caches")?;
    assert_eq!(guest.sh("cat /root/before; md5sum < /root/noise")?, format!("before\n{noise}"));
    guest.sh(LOAD)?;
    guest.sh("cp /root/noise /root/copy && rm /root/noise && sync && fstrim -v / || true")?;
    guest.sh("echo 3 > /proc/sys/vm/drop_caches")?;
    assert_eq!(guest.sh("md5sum < /root/copy")?, noise);
    guest.check_log()?;
    assert_eq!(guest.sh(SATA_ERRORS)?, "");
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

#[test]
#[ignore = "long"]
fn a_machine_with_two_cpus_and_its_root_on_nvme_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::BookwormGeneric, 2)
}

#[test]
#[ignore = "long"]
fn a_machine_with_6_12_and_its_root_on_nvme_goes_on_as_a_guest() -> Result<()> {
    goes_on(Kernel::TrixieGeneric, 1)
}

#[test]
#[ignore = "long"]
fn a_machine_with_encrypted_volumes_on_nvme_goes_on_as_a_guest() -> Result<()> {
    goes_on_with_volumes()
}

#[test]
#[ignore = "long"]
fn a_machine_with_its_root_on_ahci_goes_on_as_a_guest() -> Result<()> {
    goes_on_with_ahci(Kernel::BookwormGeneric, 1)
}

#[test]
#[ignore = "long"]
fn a_machine_with_two_cpus_and_its_root_on_ahci_goes_on_as_a_guest() -> Result<()> {
    goes_on_with_ahci(Kernel::BookwormGeneric, 2)
}

#[test]
#[ignore = "long"]
fn a_machine_with_6_12_and_its_root_on_ahci_goes_on_as_a_guest() -> Result<()> {
    goes_on_with_ahci(Kernel::TrixieGeneric, 1)
}
