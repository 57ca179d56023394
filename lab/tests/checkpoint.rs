//! Checkpoint and restore of whole machines. Either the machine runs on after the instant, in
//! another emulator with the same disks, or the attempt changes nothing.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Boot, Bus, Disk, Init, Iommu, Kernel, Loader, Machine, Nic, Reservation, Reset, Result, Spec, guests,
    iommu, is_full,
    operator::complaints,
    restart::{
        self, boot_id, comes_further, count, is_well, knows_the_time, nothing_wrong,
        script::{ATTACH_BLOCKS, BLOCKS, CLOCK, ECHO, HEAR, SECRET, TALK, TELL},
        start,
    },
};
use workloads::{
    devices::{Devices, inflate, real_hardware, virtio},
    kernel, load_test_module, number,
    restart::{
        DISK, SWAPPED, balances_agree, checkpoint, encrypt, free_port, hold_registers, need_qemu,
        nothing_is_encrypted_twice, plug_dimm_in, plug_in, plug_memory_in, prepare, registers_were_held,
        spec, wired, with_disk,
    },
};

const MINUTE: Duration = Duration::from_secs(60);

/// The offset of the format's version in an image.
const VERSION_AT: u32 = 16;

/// The command that loads drivers, and brings up the only card.
const NETWORK: &str = "modprobe -a e1000e virtio_net nvme; \
     card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); ip address add 10.0.2.15/24 dev $card; \
     ip link set $card up; until ping -c 1 -W 1 10.0.2.2; do sleep 0.2; done";

/// Restores a machine again and again, each time in another emulator.
fn goes_on(spec: Spec, times: u32) -> Result<Machine> {
    goes_on_from(spec, DISK, times)
}

fn goes_on_from(spec: Spec, disk: &str, times: u32) -> Result<Machine> {
    need_qemu()?;
    let mut machine = Machine::boot(spec)?;
    if machine.has_network() {
        machine.sh(NETWORK)?;
    }
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = restart::prepare(&machine, disk, "--module $MERCURY_MODULE")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    for _ in 0..times {
        knows_the_time(&machine, "before")?;
        restart::checkpoint(&machine, "", disk)?;
        machine = machine.start_other(&boot)?;
        is_well(&machine, &boot_id)?;
    }
    machine.check_next_attach()?;
    Ok(machine)
}

/// Restores a machine as often as there is time for.
#[test]
fn goes_on_again_and_again() -> Result<()> {
    // The firmware's memory map does not list a DIMM in a slot: the kernel asks ACPI.
    let spec = spec(Kernel::BookwormCloud).cpus(2).memory_slots().dimm("first");
    goes_on(spec, if is_full() { 3 } else { 1 })?.ends_clean()
}

/// A kernel thread that never rests holds up no machine from an image, although the end of the watch on DMA
/// waits until each of them has rested.
#[test]
#[ignore = "long"]
fn a_thread_that_never_rests_holds_up_no_machine() -> Result<()> {
    need_qemu()?;
    let mut machine = Machine::boot(spec(Kernel::BookwormGeneric))?;
    load_test_module(&machine)?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    machine.sh("echo restless 1 > /dev/mercury_test")?;
    checkpoint(&machine)?;
    machine = machine.start_other(&boot)?;
    machine.sh("pgrep mercury_restless")?;
    // The undo process lets applications go on if the command does not come back from the driver.
    machine.sh("for i in $(seq 50); do pgrep -x mercury || exit 0; sleep 0.2; done; exit 1")?;
    comes_further(&machine, "clock", count(&machine, "clock")?)?;
    machine.sh("echo restless 0 > /dev/mercury_test")?;
    is_well(&machine, &boot_id)?;
    // The next snapshot needs the watch again, and the driver is not unloaded before its end.
    machine.check_next_attach()?;
    machine.mercury("attach")?;
    machine.sh("mercury-workload snapshot --pool-pages 20000 --rounds 1")?;
    // The module goes as well.
    machine.mercury("unload --detach")?;
    machine.ends_clean()
}

/// Saves and restores memory that is plugged in while the machine runs. The restore environment
/// finds it whether it was there from the start, or came after the driver was loaded, or while the
/// hypervisor was attached.
fn goes_on_with_plugged_memory(kernel: Kernel) -> Result<()> {
    need_qemu()?;
    let mut machine = Machine::boot(spec(kernel).memory_mib(768).memory_slots().dimm("first"))?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    machine.mercury("attach")?;
    machine.mercury("detach")?;
    plug_memory_in(&mut machine, "second")?;
    machine.mercury("attach")?;
    plug_memory_in(&mut machine, "third")?;
    machine.sh("head -c 320M /dev/urandom > /dev/shm/file")?;
    let sum = machine.sh("sha256sum /dev/shm/file")?;
    let pages = "awk '/Normal/ {normal = 1} /present/ && normal {print $2; exit}' /proc/zoneinfo";
    assert_eq!(machine.sh(pages)?, "98304", "all three are in the zone that begins at 4 GiB");
    checkpoint(&machine)?;
    machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    assert_eq!(machine.sh("sha256sum /dev/shm/file")?, sum);
    machine.check_next_attach()?;
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn goes_on_with_plugged_memory_on_6_1() -> Result<()> {
    goes_on_with_plugged_memory(Kernel::BookwormCloud)
}

/// Refuses a checkpoint of memory that a driver makes available after each boot (virtio-mem). The
/// restore environment does not find such memory, so no image of it could be restored. The machine
/// can be attached.
#[test]
#[ignore = "long"]
fn memory_of_virtio_mem_is_refused() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormCloud).memory_slots();
    let memory = ["-object", "memory-backend-ram,id=plugged-memory,size=256M"];
    let device = ["-device", "virtio-mem-pci,id=plugged,memdev=plugged-memory,requested-size=256M"];
    let machine = Machine::boot(memory.into_iter().chain(device).fold(spec, Spec::qemu_arg))?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true; modprobe virtio_mem")?;
    machine.sh("for i in $(seq 300); do grep -q virtio_mem /proc/iomem && exit; sleep 0.1; done; exit 1")?;
    for line in [&format!("checkpoint --poweroff {DISK}"), "checkpoint /run/x", "migrate --dry-run"] {
        fails_with(&machine, &format!("mercury {line}"), "restore-memory")?;
    }
    for section in machine.mercury("doctor")?["operations"].as_array().unwrap() {
        let is_named = section["items"].to_string().contains("restore-memory");
        assert_eq!(is_named, section["operation"] != "snapshot", "{section}");
    }
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Keeps memory offline that is plugged in while a machine is restored: frames of the image may lie there.
#[test]
#[ignore = "long"]
fn no_memory_comes_while_a_machine_is_restored() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormCloud).cpus(1).memory_mib(768).memory_slots().kernel_arg("mem=400M");
    let machine = Machine::boot(spec)?;
    machine.sh("insmod $MERCURY_MODULE")?;
    let mut restores = machine.spawn("exec mercury-workload restore-begin --until-file /run/end")?;
    while !restores.errors_so_far()?.contains("begun") {
        assert!(!restores.has_ended()?, "{}", restores.wait(MINUTE)?.stdout);
        thread::sleep(Duration::from_millis(200));
    }
    let total = || machine.sh("awk '/MemTotal/ {print $2}' /proc/meminfo");
    let before = total()?;
    plug_dimm_in(&machine, "first")?;
    // The first section above 4 GiB.
    let block = "/sys/devices/system/memory/memory32";
    machine.sh(&format!("for i in $(seq 300); do test -e {block} && exit; sleep 0.1; done; exit 1"))?;
    let refused = machine.run(&format!("sleep 1; echo online > {block}/state"))?;
    assert!(refused.stderr.contains("Device or resource busy"), "{}", refused.stderr);
    assert_eq!((machine.sh(&format!("cat {block}/state"))?, total()?), ("offline".to_owned(), before));
    machine.sh("touch /run/end")?;
    let said = restores.wait(MINUTE)?;
    assert!(said.success(), "{}", said.stderr);
    machine.sh(&format!("echo online > {block}/state")).map(drop)
}

#[test]
#[ignore = "long"]
fn goes_on_with_plugged_memory_on_6_12() -> Result<()> {
    goes_on_with_plugged_memory(Kernel::TrixieCloud)
}

/// Leaves the firmware's memory to the firmware, whose services can be called afterwards.
#[test]
#[ignore = "long"]
fn goes_on_with_uefi() -> Result<()> {
    let machine = goes_on(spec(Kernel::BookwormCloud).uefi(), 2)?;
    let variables = "mount -t efivarfs none /sys/firmware/efi/efivars; ls /sys/firmware/efi/efivars | wc -l";
    assert_ne!(machine.sh(variables)?, "0");
    machine.check_health()?;
    machine.ends_clean()
}

/// Restores a KVM host with its virtual machines at work. They count on in another emulator, with
/// their memory.
fn guests_go_on(kernel: Kernel) -> Result<()> {
    need_qemu()?;
    let mut machine = Machine::boot(spec(kernel).cpus(2))?;
    machine.put("/run/vm", include_bytes!("../guest/kvm/counter"), 0o755)?;
    machine.sh("modprobe kvm_amd; mkdir /run/guests")?;
    start(&machine, "clock", CLOCK, "")?;
    for number in ["1", "2"] {
        machine.sh(&format!(
            "mkfifo /run/guests/{number}; setsid bash -c 'python3 /run/vm < /run/guests/{number} > \
             /run/guests/said{number} 2>&1' & exec 9> /run/guests/{number}; setsid sleep infinity >&9 &"
        ))?;
    }
    let made = "until test $(cat /run/guests/said* | grep -c made) = 2; do sleep 0.2; done";
    machine.sh(made)?;
    let (boot, _folder) = restart::prepare(&machine, DISK, "--module $MERCURY_MODULE")?;
    let boot_id = restart::boot_id(&machine)?;
    for _ in 0..2 {
        checkpoint_beside_kvm(&machine)?;
        machine = machine.start_other(&boot)?;
        is_well(&machine, &boot_id)?;
        assert_eq!(machine.sh("cat /run/guests/said*; pgrep -fc '^python3 /run/vm'")?, "made\nmade\n2");
        thread::sleep(Duration::from_secs(2));
    }
    // The guests end when the writer of their input ends, and print their progress.
    machine
        .sh("pkill -f '^sleep infinity'; for i in $(seq 600); do pgrep -f '^python3 /run/vm' || exit 0; \
        sleep 0.1; done; exit 1")?;
    let said = machine.sh("cat /run/guests/said*")?;
    let counted: Vec<u64> =
        said.lines().filter_map(|line| line.strip_prefix("counted ")?.parse().ok()).collect();
    assert!(counted.len() == 2 && counted.iter().all(|count| *count > 1000), "{said}");
    // New guests can be made.
    machine.sh("sleep 3 | python3 /run/vm")?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Restores a host with stock QEMU and Linux in it, on one CPU and on two. The guest's computation
/// goes on, and its memory is unchanged.
fn linux_guests_go_on(kernel: Kernel) -> Result<()> {
    need_qemu()?;
    let spec = spec(kernel).cpus(2).memory_mib(1280);
    let mut machine =
        Machine::boot(guests::arguments()?.iter().fold(spec, |spec, word| spec.qemu_arg(word)))?;
    machine.put("/root/init.c", include_bytes!("../guest/kvm/init.c"), 0o644)?;
    machine.put("/root/initrd", include_bytes!("../guest/kvm/initrd"), 0o755)?;
    machine.put("/root/boot", include_bytes!("../guest/kvm/boot"), 0o755)?;
    machine.sh(
        "modprobe kvm_amd; mkdir /run/guests /run/lives; mount -o ro $(blkid -L mercury-guests) /run/guests",
    )?;
    start(&machine, "clock", CLOCK, "")?;
    for cpus in GUESTS_CPUS {
        machine.sh(&format!(
            "mkfifo /run/lives/{cpus}; setsid bash -c '/root/boot {cpus} 1000000 < /run/lives/{cpus} > \
             /run/lives/said{cpus} 2>&1' & exec 9> /run/lives/{cpus}; setsid sleep infinity >&9 &"
        ))?;
    }
    let mut far = guests_come_further(&machine, [0, 0])?;
    let (boot, _folder) = restart::prepare(&machine, DISK, "--module $MERCURY_MODULE")?;
    let boot_id = restart::boot_id(&machine)?;
    for _ in 0..2 {
        checkpoint_beside_kvm(&machine)?;
        machine = machine.start_other(&boot)?;
        is_well(&machine, &boot_id)?;
        far = guests_come_further(&machine, guests_are_at(&machine)?)?;
    }
    println!("they have come to {far:?}");
    for cpus in GUESTS_CPUS {
        machine.sh(&format!("echo > /run/lives/{cpus}"))?;
        machine.sh(&format!(
            "for i in $(seq 1200); do grep -q ' wrong ' /run/lives/said{cpus} && exit; \
            sleep 0.1; done; exit 1"
        ))?;
        let said = machine.sh(&format!("cat /run/lives/said{cpus}"))?;
        let ended = format!("cpus {cpus} processes ");
        assert!(said.contains(&ended) && said.contains(" wrong 0") && complaints(&said).is_empty(), "{said}");
        assert_eq!(said.matches("begins").count(), 1, "{said}");
    }
    // The loader of QEMU's own libraries runs QEMU.
    machine.sh("for i in $(seq 600); do pgrep -x ld-linux-x86-64 || exit 0; sleep 0.1; done; exit 1")?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

const GUESTS_CPUS: [u32; 2] = [1, 2];

/// Returns how many processes Linux in each guest has had.
fn guests_are_at(machine: &Machine) -> Result<[u64; 2]> {
    let at = |cpus: u32| -> Result<u64> {
        let said = machine.sh(&format!("cat /run/lives/said{cpus}"))?;
        Ok(said
            .rsplit("so far ")
            .next()
            .and_then(|rest| rest.lines().next()?.trim().parse().ok())
            .unwrap_or(0))
    };
    Ok([at(GUESTS_CPUS[0])?, at(GUESTS_CPUS[1])?])
}

fn guests_come_further(machine: &Machine, before: [u64; 2]) -> Result<[u64; 2]> {
    for _ in 0..900 {
        let at = guests_are_at(machine)?;
        if at[0] > before[0] && at[1] > before[1] {
            return Ok(at);
        }
        thread::sleep(Duration::from_secs(1));
    }
    panic!("before {before:?}: {}", machine.sh("tail -n 50 /run/lives/said*")?);
}

fn checkpoint_beside_kvm(machine: &Machine) -> Result<()> {
    let mut checkpoint = machine.spawn(&format!("mercury checkpoint --poweroff {DISK}"))?;
    machine.wait_shutdown(Duration::from_secs(180)).map(drop).inspect_err(|_| {
        println!("{:?}", checkpoint.errors_so_far());
    })
}

#[test]
#[ignore = "long"]
fn guests_go_on_on_6_1() -> Result<()> {
    guests_go_on(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn guests_go_on_on_6_12() -> Result<()> {
    guests_go_on(Kernel::TrixieCloud)
}

#[test]
#[ignore = "long"]
fn linux_guests_go_on_on_6_1() -> Result<()> {
    linux_guests_go_on(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn linux_guests_go_on_on_6_12() -> Result<()> {
    linux_guests_go_on(Kernel::TrixieCloud)
}

/// Restores a machine behind an IOMMU. The image has the IOMMU's tables; another kernel has set its
/// registers since.
fn goes_on_behind(spec: Spec, disk: &str, times: u32) -> Result<()> {
    let machine = goes_on_from(spec, disk, times)?;
    iommu::check(&machine)?;
    machine.sh("ping -c 3 -W 10 10.0.2.2")?;
    machine.sh(
        "echo 3 > /proc/sys/vm/drop_caches; cat /bin/* > /dev/null; for disk in $(lsblk -dno PATH); do \
         dd if=$disk of=/dev/null bs=1M count=50 iflag=direct status=none || exit; done",
    )?;
    // The machine that was brought back is checkpointed once more while it works.
    machine.mercury("attach")?;
    println!("{}", machine.sh("mercury-workload snapshot --pool-pages 50000 --rounds 2")?);
    machine.mercury("detach")?;
    iommu::check(&machine)?;
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn goes_on_behind_intels_iommu() -> Result<()> {
    goes_on_behind(spec(Kernel::BookwormCloud).nic(Nic::Virtio).iommu(Iommu::Intel), DISK, 2)
}

/// Restores a machine behind AMD's IOMMU. The virtio disks are not behind it: one holds the image,
/// the other one the artefacts.
#[test]
#[ignore = "long"]
fn goes_on_behind_amds_iommu() -> Result<()> {
    let spec = spec(Kernel::BookwormGeneric).root_bus(Bus::Ahci).disk(Bus::Nvme, 64).nic(Nic::E1000e);
    goes_on_behind(spec.iommu(Iommu::Amd), "/dev/vdb", 1)
}

/// Restores a machine in x2APIC mode, where interrupts reach the CPUs because they are remapped.
#[test]
#[ignore = "long"]
fn goes_on_in_x2apic_mode() -> Result<()> {
    let spec = spec(Kernel::BookwormCloud).cpu("EPYC-Milan,+svm,+npt,+x2apic,+vgif");
    let machine = goes_on(spec.iommu(Iommu::Intel), 1)?;
    machine.sh("dmesg | grep -i 'x2apic enabled'")?;
    iommu::check(&machine)?;
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn goes_on_with_systemd_on_four_cpus() -> Result<()> {
    let machine = goes_on(spec(Kernel::TrixieCloud).cpus(4).init(Init::Systemd), 1)?;
    let failed = machine.sh("systemctl --failed --no-legend")?;
    assert_eq!(failed, "");
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn goes_on_on_one_cpu_with_the_generic_kernel() -> Result<()> {
    goes_on(spec(Kernel::BookwormGeneric).cpus(1), 1)?.ends_clean()
}

/// Restores a machine whose files are all in memory, and so in the image.
#[test]
#[ignore = "long"]
fn goes_on_with_a_root_in_ram() -> Result<()> {
    let spec = spec(Kernel::BookwormCloud).memory_mib(1536).kernel_arg("lab.root=ram");
    let machine = goes_on(spec, 2)?;
    assert_eq!(machine.sh("findmnt -no FSTYPE /; findmnt -rno TARGET -t ext4")?, "tmpfs\n/mercury");
    machine.sh("echo x > /root/x && grep x /root/x")?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Checks that another emulator's devices go on with the work that devices and their drivers had
/// under way at the instant.
fn devices_go_on(devices: Devices) -> Result<()> {
    need_qemu()?;
    let devices = devices.with(with_disk);
    let machine = devices.boot()?;
    start(&machine, "clock", CLOCK, "")?;
    if devices.has_balloon() {
        inflate(&machine, true)?;
    }
    // The only other virtio disk is at work, or holds the artefacts.
    let disk = "/dev/vdb";
    let (boot, _folder) = restart::prepare(&machine, disk, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    restart::checkpoint(&machine, "", disk)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    devices.go_on(&machine)?;
    if devices.has_balloon() {
        inflate(&machine, true)?;
        inflate(&machine, false)?;
        devices.go_on(&machine)?;
    }
    devices.end(&machine)?;
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn virtio_goes_on_at_work() -> Result<()> {
    devices_go_on(virtio())
}

#[test]
#[ignore = "long"]
fn real_hardware_goes_on_at_work() -> Result<()> {
    devices_go_on(real_hardware())
}

/// Restores the registers of the instant: extended state, flags, debug registers.
#[test]
#[ignore = "long"]
fn registers_go_on() -> Result<()> {
    need_qemu()?;
    let mut machine = Machine::boot(spec(Kernel::BookwormCloud).cpus(2))?;
    start(&machine, "clock", CLOCK, "")?;
    hold_registers(&machine)?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    for _ in 0..2 {
        checkpoint(&machine)?;
        machine = machine.start_other(&boot)?;
        is_well(&machine, &boot_id)?;
    }
    registers_were_held(&machine)?;
    machine.check_next_attach()
}

/// A process that drives a card by itself, and reports that. Its arguments are the card's address
/// and IOMMU group.
const USER_OF_A_CARD: &str = r#"
import ctypes, fcntl, mmap, os, struct, time
GROUP_GET_DEVICE_FD, GROUP_SET_CONTAINER, SET_IOMMU, TYPE_1 = 0x3b6a, 0x3b68, 0x3b66, 1
MAP_DMA, READ_WRITE = 0x3b71, 3
address, number, way = sys.argv[1:]
container, group = (os.open(f"/dev/vfio/{name}", os.O_RDWR) for name in ("vfio", number))
fcntl.ioctl(group, GROUP_SET_CONTAINER, container.to_bytes(4, "little"))
fcntl.ioctl(container, SET_IOMMU, TYPE_1)
if way == "maps":
    memory = mmap.mmap(-1, 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(container, MAP_DMA, struct.pack("<IIQQQ", 32, READ_WRITE, at, 0x100000, 4096))
else:
    device = fcntl.ioctl(group, GROUP_GET_DEVICE_FD, address.encode() + b"\0")
say(1)
time.sleep(10000)
"#;

/// Refuses, by name, a device that a process drives by itself, unless `--force-devices` is given.
#[test]
#[ignore = "long"]
fn devices_of_processes_are_refused() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormGeneric).nic(Nic::E1000e).iommu(Iommu::Intel))?;
    let address = machine.sh("cd /sys/bus/pci/devices; dirname $(grep -l 0x020000 */class)")?;
    let card = format!("/sys/bus/pci/devices/{address}");
    machine.sh(&format!(
        "modprobe vfio-pci; echo vfio-pci > {card}/driver_override; \
         test ! -e {card}/driver || echo {address} > {card}/driver/unbind; \
         echo {address} > /sys/bus/pci/drivers_probe; \
         until readlink {card}/driver | grep vfio; do sleep 0.1; done"
    ))?;
    let group = machine.sh(&format!("basename $(readlink {card}/iommu_group)"))?;
    machine.sh("sync; mount -o remount,ro /")?;
    devices_count_that_are_opened_later(&machine, &format!("{address} {group}"))?;
    machine.sh("mount -o remount,rw /")?;
    start(&machine, "card", USER_OF_A_CARD, &format!("{address} {group} opens"))?;
    let named = format!("device {address}, which a process drives by itself (vfio-pci)");
    for line in ["checkpoint --hook true /dev/vda", "checkpoint --poweroff /dev/vda", "snapshot"] {
        fails_with(&machine, &format!("mercury {line}"), &named)?;
    }
    machine.sh("sync; mount -o remount,ro /")?;
    image(&machine, "--force-devices", DISK)?;
    assert!(machine.sh(&format!("mercury inspect {DISK}"))?.contains("whole: "));
    machine.sh("mercury snapshot --force-devices")?;
    assert!(machine.sh("mercury status --json")?.contains("\"kept\""));
    machine.sh("mercury snapshot --drop; mercury detach; pgrep -f '^python3 /run/card.py'")?;
    machine.sh(END_OF_CARD)?;
    devices_of_uio_count(&machine, &address)?;
    machine.check_next_attach()
}

/// A command that ends the user of the card.
const END_OF_CARD: &str = "pkill -f '^python3 /run/card.py'; while pgrep -f '^python3 /run/card.py'; do \
    sleep 0.1; done; rm -f /run/card";

/// Waits until the kept snapshot is lost, because a device may have written to memory unseen.
fn is_lost(machine: &Machine) -> Result<()> {
    machine.sh(
        "for i in $(seq 100); do mercury status | grep 'lost: snapshot-devices' && break; sleep 0.1; done; \
         ! mercury rollback 2> /run/said && grep no-snapshot /run/said && mercury detach",
    )?;
    Ok(())
}

/// Loses a kept snapshot when a process begins to drive a device by itself, or only gives it memory. A
/// checkpoint that reads memory meanwhile makes no image, although the device is idle again at the end.
fn devices_count_that_are_opened_later(machine: &Machine, card: &str) -> Result<()> {
    for way in ["maps", "opens"] {
        machine.sh("mercury snapshot && mercury status --json | grep '\"kept\"'")?;
        start(machine, "card", USER_OF_A_CARD, &format!("{card} {way}"))?;
        is_lost(machine)?;
        machine.sh(END_OF_CARD)?;
    }
    let slow = machine.spawn("mercury checkpoint - 2> /run/said | (sleep 25; cat > /dev/null)")?;
    machine.sh("until mercury status --json | grep -q '\"in-use\"'; do sleep 0.1; done")?;
    start(machine, "card", USER_OF_A_CARD, &format!("{card} maps"))?;
    machine.sh(END_OF_CARD)?;
    slow.wait(Duration::from_secs(240))?;
    let said = machine.sh("cat /run/said")?;
    assert!(said.contains("snapshot-devices"), "{said}");
    // Idle again, it is no obstacle.
    machine.sh("mercury snapshot && mercury snapshot --drop | cat && mercury detach").map(drop)
}

/// Loses a kept snapshot when the module of uio comes, and when a process opens a device of uio.
fn devices_of_uio_count(machine: &Machine, address: &str) -> Result<()> {
    let card = format!("/sys/bus/pci/devices/{address}");
    machine.sh("mount -o remount,ro / && mercury snapshot && modprobe uio_pci_generic")?;
    is_lost(machine)?;
    machine.sh(&format!(
        "echo {address} > {card}/driver/unbind; echo uio_pci_generic > {card}/driver_override; \
         echo {address} > /sys/bus/pci/drivers_probe; test -c /dev/uio0; \
         setpci -s {address} COMMAND=0:4 2> /dev/null || true; mercury snapshot; sleep 1000 < /dev/uio0 & \
         sleep 1"
    ))?;
    is_lost(machine)?;
    machine.sh("pkill -x sleep; mount -o remount,rw /").map(drop)
}

/// Keeps connections with a third machine across the end of the first emulator. Neither side sees
/// more than silence, whichever speaks.
#[test]
#[ignore = "long"]
fn connections_go_on() -> Result<()> {
    need_qemu()?;
    let both = Reservation::of(2, &[Kernel::BookwormCloud])?;
    let port = free_port();
    let peer = Machine::boot_reserved(wired(spec(Kernel::BookwormCloud).cpus(1), port, "listen"), &both)?;
    let machine = Machine::boot_reserved(wired(spec(Kernel::BookwormCloud), port, "connect"), &both)?;
    plug_in(&peer, "10.9.0.1")?;
    plug_in(&machine, "10.9.0.2")?;
    start(&peer, "echo", ECHO, "")?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh("until ping -c 1 -W 1 10.9.0.1 > /dev/null; do sleep 0.2; done")?;
    start(&machine, "talk", TALK, "10.9.0.1")?;
    start(&machine, "hear", HEAR, "")?;
    start(&peer, "tell", TELL, "10.9.0.2")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    checkpoint(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    comes_further(&machine, "talk", count(&machine, "talk")?)?;
    comes_further(&machine, "hear", count(&machine, "hear")?)?;
    nothing_wrong(&peer)?;
    machine.ends_clean()
}

/// Restores a database at work: committed transactions are there, and every sum is right.
#[test]
#[ignore = "long"]
fn a_database_goes_on() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).cpus(2).memory_mib(1536))?;
    machine.start_postgres()?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh("setsid pgbench -n -c 4 -T 600 bench > /run/pgbench.said 2>&1 < /dev/null & sleep 2")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    checkpoint(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    let history = |machine: &Machine| -> Result<u64> {
        Ok(machine.sh("psql -At bench -c 'select count(*) from pgbench_history'")?.parse().unwrap_or(0))
    };
    let before = history(&machine)?;
    thread::sleep(Duration::from_secs(3));
    assert!(history(&machine)? > before, "{}", machine.sh("cat /run/pgbench.said")?);
    machine.sh("pkill -INT pgbench; sleep 1")?;
    balances_agree(&machine)?;
    assert!(!machine.sh("cat /run/pgbench.said")?.contains("ERROR"));
    machine.ends_clean()
}

/// The word that ends the restore environment at a failure, instead of another try.
const GIVE_UP: &str = "mercury.give-up";

/// Returns a text with wrapped lines as one line.
fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Checks that the restore environment ends without a restore, and gives the reason.
fn is_refused(machine: Machine, boot: &Boot, reason: &str) {
    let error = unwrapped(&machine.start_other(&boot.with(GIVE_UP)).map(drop).unwrap_err().to_string());
    assert!(error.contains(reason) && error.contains("could not be brought back"), "{error}");
}

/// Opens the image as a core: the kernel's banner is at its address, and each CPU is at its
/// instruction.
fn debuggers_open(machine: &Machine) -> Result<()> {
    machine.sh("mkdir -p /run/core && mount -t tmpfs -o size=700m none /run/core")?;
    machine.sh(&format!("mercury inspect --core /run/core/core {DISK}"))?;
    // One symbol is in memory that the kernel cannot write to, the other in memory that it can. The
    // kernel's freed initial memory lies in between.
    let [banner, names] = ["banner", "names"].map(|name| machine.sh(&format!("echo 0x$(cat /root/{name})")));
    let (banner, names) = (banner?, names?);
    let line =
        format!("gdb -batch -ex 'x/s {banner}' -ex 'x/s {names}' -ex 'info threads' -c /run/core/core 2>&1");
    let said = machine.sh(&line)?;
    assert!(said.contains("Linux version 6.1") && said.contains("\"Linux\""), "{said}");
    assert_eq!(said.matches("New LWP").count(), 2, "{said}");
    machine.sh("umount /run/core").map(drop)
}

#[test]
#[ignore = "long"]
fn disks_that_have_moved_on_are_refused() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    start(&machine, "clock", CLOCK, "")?;
    for (symbol, file) in [("linux_banner", "banner"), ("init_uts_ns", "names")] {
        machine.sh(&format!("grep ' {symbol}$' /proc/kallsyms | cut -d ' ' -f 1 > /root/{file}"))?;
    }
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    checkpoint(&machine)?;
    let machine = machine.start_again()?;
    machine.sh("echo later > /root/later; sync")?;
    let said = machine.sh(&format!("mercury inspect {DISK}"))?;
    assert!(said.contains("whole: "), "{said}");
    debuggers_open(&machine)?;
    let reason = "was written to after the instant";
    let said = machine.try_other(&boot, Duration::from_secs(40))?;
    assert!(said.contains("the next attempt is in 10 s"), "{said}");
    assert!(said.matches(reason).count() > 1, "once only: {said}");
    is_refused(machine, &boot, reason);
    Ok(())
}

/// A file system on two disks that mirror each other, encrypted, and divided by LVM, with one of
/// LVM's parts after the other.
const VOLUMES: &str = r"
set -e
export DM_DISABLE_UDEV=1
modprobe -a raid1 dm-crypt dm-mod
mdadm --create /dev/md0 --run --level=1 --metadata=1.2 --raid-devices=2 /dev/vdb /dev/vdc
echo a secret | cryptsetup luksFormat -q --pbkdf pbkdf2 --pbkdf-force-iterations 1000 /dev/md0 -
echo a secret | cryptsetup open --key-file - /dev/md0 safe
pvcreate -q /dev/mapper/safe
vgcreate -q group /dev/mapper/safe
lvcreate -q -Zn -l 4 -n first group
lvcreate -q -Zn -l 8 -n gap group
lvextend -q -l +8 group/first
mkfs.ext4 -q /dev/mapper/group-first
mkdir -p /data
mount /dev/mapper/group-first /data
echo there > /data/file
mdadm --wait /dev/md0 || true
";

/// Compares fingerprints on the disks that lie under volumes. The restore environment assembles no
/// volume.
#[test]
#[ignore = "long"]
fn goes_on_with_volumes() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormCloud).disk(Bus::Virtio, 256).disk(Bus::Virtio, 256);
    let machine = Machine::boot(spec)?;
    machine.command(VOLUMES).timeout(Duration::from_secs(180)).run()?.check()?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    // The reshape takes minutes. It goes on after the instant, and pauses at the instant.
    machine
        .sh("cd /sys/block/md0/md; echo 1000 > sync_speed_max; echo check > sync_action; cat sync_action")?;
    knows_the_time(&machine, "before")?;
    let hook = "--hook 'cat /sys/block/md0/md/sync_action /sys/block/md0/md/array_state > /run/held'";
    restart::checkpoint(&machine, hook, DISK)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    assert_eq!(machine.sh("cat /run/held; cat /sys/block/md0/md/sync_action")?, "frozen\nclean\ncheck");
    machine.sh("echo idle > /sys/block/md0/md/sync_action")?;
    assert_eq!(
        machine.sh("cat /data/file; echo on >> /data/file; sync /data/file; cat /data/file")?,
        "there\nthere\non"
    );
    assert_eq!(machine.sh("cat /sys/block/md0/md/degraded")?, "0");
    let said = machine.sh(&format!("mercury inspect --json {DISK}"))?;
    assert!(said.contains("\"disk\":\"md ") || said.contains("\"disk\": \"md "), "{said}");
    machine.ends_clean()?;
    is_refused(machine, &boot, "/data (/dev/mapper/group-first) was written to after the instant");
    Ok(())
}

/// A thin pool on a disk, with a volume that nothing has mounted.
const THIN_POOL: &str = r"
set -e
modprobe -a dm-mod dm-thin-pool
dmsetup create meta --noudevsync --table '0 8192 linear /dev/vdb 0'
dmsetup create data --noudevsync --table '0 98304 linear /dev/vdb 8192'
head -c 4096 /dev/zero > /dev/dm-0
sync
dmsetup create pool --noudevsync --table '0 98304 thin-pool /dev/dm-0 /dev/dm-1 128 0'
dmsetup message pool 0 'create_thin 0'
dmsetup create thin --noudevsync --table '0 65536 thin /dev/dm-2 0'
dd if=/dev/urandom of=/dev/dm-3 bs=1M count=4 oflag=direct status=none
";

/// A hook that makes a thin snapshot.
const THIN_SNAPSHOT: &str = "set -e\n\
    dmsetup suspend --nolockfs --noudevsync thin\n\
    dmsetup message pool 0 'create_snap 1 0'\n\
    dmsetup resume --noudevsync thin\n";

/// Waits until a thin pool is at rest that is not mounted, also if a hook has written to it, and brings it
/// back. A machine that runs on is refused: the metadata of the pool would be stale in the image. A thin
/// snapshot by a hook is for an operator who puts all its disks back, and says so.
#[test]
#[ignore = "long"]
fn goes_on_with_a_thin_pool() -> Result<()> {
    const STALE: &str = "hold metadata of volumes that change on: pool (dm-2, thin-pool)";
    const SUMS: &str = "for one in dm-3 dm-4; do dd if=/dev/$one bs=1M iflag=direct status=none | sha256sum; \
        done";
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).disk(Bus::Virtio, 64))?;
    machine.sh(THIN_POOL)?;
    start(&machine, "clock", CLOCK, "")?;
    fails_with(&machine, "mercury checkpoint --hook true /run/x", STALE)?;
    machine.put("/run/hook", THIN_SNAPSHOT.as_bytes(), 0o755)?;
    image(&machine, "--force-devices --hook 'sh /run/hook'", "/run/x")?;
    machine.sh("rm /run/x; dmsetup create snap --noudevsync --table '0 65536 thin /dev/dm-2 1'; \
         head -c 65536 /dev/urandom > /run/block")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = boot_id(&machine)?;
    // The pool adds a block, which its worker commits later.
    let write = "dd if=/run/block of=/dev/dm-3 bs=64k seek=128 oflag=direct";
    restart::checkpoint(&machine, &format!("--hook '{write}'"), DISK)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    let block = "dd if=/dev/dm-3 bs=64k skip=128 count=1 iflag=direct status=none | cmp - /run/block";
    machine.sh(block)?;
    machine.sh("dd if=/run/block of=/dev/dm-4 bs=64k seek=200 oflag=direct; sleep 3")?;
    let sums = machine.sh(SUMS)?;
    let state = machine.sh("dmsetup status pool")?;
    assert!(state.contains(" rw ") && !state.contains("needs_check"), "{state}");
    // The same from the disk alone.
    machine.sh("set -e; for one in snap thin pool; do dmsetup remove --noudevsync $one; done; \
         dmsetup create pool --noudevsync --table '0 98304 thin-pool /dev/dm-0 /dev/dm-1 128 0'; \
         dmsetup create thin --noudevsync --table '0 65536 thin /dev/dm-2 0'; \
         dmsetup create snap --noudevsync --table '0 65536 thin /dev/dm-2 1'")?;
    assert_eq!(machine.sh(SUMS)?, sums);
    machine.sh(block)?;
    machine.ends_clean()
}

/// Refuses RAID of device mapper by name if it is in use, and waits for it otherwise.
#[test]
#[ignore = "long"]
fn raid_of_device_mapper_is_refused_in_use() -> Result<()> {
    const LINE: &str = "mercury checkpoint --poweroff --hook 'exit 3' /dev/vda --overwrite";
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).disk(Bus::Virtio, 64))?;
    machine.sh("set -e; modprobe -a dm-mod raid1 dm-raid; \
         dmsetup create first --noudevsync --table '0 8192 linear /dev/vdb 0'; \
         dmsetup create second --noudevsync --table '0 8192 linear /dev/vdb 8192'; \
         dmsetup create both --noudevsync --table '0 8192 raid raid1 2 0 nosync 2 - /dev/dm-0 - /dev/dm-1'")?;
    println!("{}", machine.sh("dmsetup table; dmsetup status")?);
    fails_with(&machine, LINE, "the hook failed")?;
    machine.sh("setsid sleep 10000 < /dev/dm-2 > /dev/null 2>&1 &")?;
    fails_with(&machine, LINE, "both (dm-2, raid, in use)")?;
    machine.sh("pkill -f '^sleep 10000'; dmsetup create above --noudevsync --table \
         '0 8192 linear /dev/dm-2 0'; sleep 2")?;
    fails_with(&machine, LINE, "the hook failed")?;
    machine.check_next_attach()
}

/// One file system of each kind, with a file that can be overwritten in place.
const FILE_SYSTEMS: &str = r"
set -e
modprobe -a xfs btrfs vfat
mkfs.xfs -q /dev/vdb
mkfs.btrfs -q /dev/vdc
mkfs.vfat -F 32 /dev/vdd > /dev/null
for one in xfs:vdb btrfs:vdc vfat:vdd; do
    mkdir /${one%:*}
    mount /dev/${one#*:} /${one%:*}
    touch /${one%:*}/file
done
chattr +C /btrfs/file
tee /xfs/file /btrfs/file < /dev/urandom | head -c 1M > /vfat/file
sync
";

/// Finds a file that was overwritten in place soon after a thaw. XFS and btrfs would record the
/// write within half a minute, FAT in its folder.
#[test]
#[ignore = "long"]
fn goes_on_with_other_file_systems() -> Result<()> {
    const OVER: &str = "for one in xfs btrfs vfat; do dd if=/dev/urandom of=/$one/file bs=64k count=1 \
         conv=notrunc oflag=direct status=none; done";
    need_qemu()?;
    let spec = [512, 512, 300]
        .into_iter()
        .fold(spec(Kernel::BookwormCloud), |spec, mib| spec.disk(Bus::Virtio, mib))
        .kernel_arg("secretmem.enable=1");
    let machine = Machine::boot(spec)?;
    machine.sh(FILE_SYSTEMS)?;
    let sums = machine.sh("cd /; sha256sum xfs/file btrfs/file vfat/file")?;
    start(&machine, "clock", CLOCK, "")?;
    start(&machine, "secret", SECRET, "")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    checkpoint(&machine)?;
    let machine = machine.start_other(&boot)?;
    machine.sh(OVER)?;
    is_well(&machine, &boot_id)?;
    comes_further(&machine, "secret", count(&machine, "secret")?)?;
    let now = machine.sh("cd /; sha256sum xfs/file btrfs/file vfat/file")?;
    assert!(now.lines().zip(sums.lines()).all(|(now, before)| now != before), "{now}");
    let error = unwrapped(&machine.start_other(&boot.with(GIVE_UP)).map(drop).unwrap_err().to_string());
    for place in ["/xfs (/dev/vdb)", "/btrfs (/dev/vdc)", "/vfat (/dev/vdd)"] {
        assert!(error.contains(&format!("{place} was written to after the instant")), "{place}: {error}");
    }
    Ok(())
}

/// Refuses images of other machines with every reason, and leaves the running system alone.
#[test]
#[ignore = "long"]
fn images_of_others_are_refused() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    machine.sh("sync; mount -o remount,ro /")?;
    let said = image(&machine, "", DISK)?;
    assert_eq!(said["restored"], false);
    let other = spec(Kernel::BookwormGeneric).cpus(1).memory_mib(1280).nic(Nic::Virtio).iommu(Iommu::Intel);
    let other = other.cpu("EPYC,+svm,+npt,-avx2,-rdrand");
    let machine = machine.start_as(other)?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    let line = format!("mercury restore --module $MERCURY_MODULE {DISK}");
    let output = machine.run(&line)?;
    println!("{}", output.stderr);
    let reasons = [
        "the kernel is ",
        "the processor lacks avx2,",
        ", rdrand;",
        "the firmware's memory map",
        ") is new",
        "IOMMU dmar0 is new, or was not used",
        "1 CPUs are online, 2",
    ];
    for reason in reasons {
        assert!(!output.success() && output.stderr.contains(reason), "{reason}: {}", output.stderr);
    }
    // The image gets another version of the format.
    machine.sh(&format!("printf '\\011' | dd of={DISK} bs=1 seek={VERSION_AT} conv=notrunc 2> /dev/null"))?;
    fails_with(&machine, &line, "it is of version 9 of the format; this command knows 1 to")?;
    fails_with(&machine, &format!("mercury inspect {DISK}"), "it is of version 9")?;
    assert_eq!(machine.sh("cat /proc/sys/kernel/random/boot_id")?, boot_id);
    machine.check_next_attach()
}

/// Overwrites data that could be lost only if the operator says so.
#[test]
#[ignore = "long"]
fn a_disk_in_use_is_not_written_over() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).cpus(1))?;
    machine.sh(&format!("mkfs.ext4 -q {DISK} && mount {DISK} /mnt && echo mine > /mnt/x && umount /mnt"))?;
    fails_with(&machine, &format!("mercury checkpoint {DISK}"), "it holds data that is no image")?;
    machine.sh(&format!("mount {DISK} /mnt"))?;
    assert_eq!(machine.sh("cat /mnt/x")?, "mine");
    fails_with(&machine, &format!("mercury checkpoint --overwrite {DISK}"), "Device or resource busy")?;
    machine.sh("umount /mnt")?;
    machine.sh(&format!("mercury checkpoint --overwrite {DISK}"))?;
    assert!(machine.sh(&format!("mercury inspect {DISK}"))?.contains("whole: "));
    // The next image may overwrite an image.
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    machine.check_next_attach()
}

/// The program that reports a page, its memory, and from now on a failure of that memory.
const POISON: &str = r#"
import mmap, struct, time
page = mmap.mmap(-1, 4096)
page[:] = b"broken" + bytes(4090)
import ctypes
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
with open("/proc/self/pagemap", "rb") as pagemap:
    pagemap.seek(address // 4096 * 8)
    frame = struct.unpack("Q", pagemap.read(8))[0] & ((1 << 55) - 1)
page.madvise(mmap.MADV_HWPOISON)
say(frame * 4096)
time.sleep(10000)
"#;

/// Leaves broken memory out of the image, and never reads it.
#[test]
#[ignore = "long"]
fn broken_memory_is_left_out() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormGeneric))?;
    start(&machine, "poison", POISON, "")?;
    let phys = number(&machine, "/run/poison")?;
    machine.sh("grep '^HardwareCorrupted: *4 kB' /proc/meminfo")?;
    image(&machine, "", DISK)?;
    let said = machine.sh(&format!("mercury inspect --json {DISK}"))?;
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let ranges = said["machine"]["ranges"].as_array().unwrap();
    let holds = |range: &serde_json::Value| {
        let (start, pages) = (range["start_phys"].as_u64().unwrap(), range["pages"].as_u64().unwrap());
        (start..start + pages * 4096).contains(&phys)
    };
    let holder = ranges.iter().find(|range| holds(range));
    assert_eq!(holder, None, "{phys:#x}");
    machine.check_next_attach()
}

/// Restores a machine by its own command, which starts the restore environment from a system that
/// was booted since.
fn comes_back_in_place(spec: Spec) -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec.reset(Reset::Restarts))?;
    machine.sh("sync; mount -o remount,ro /")?;
    start(&machine, "clock", CLOCK, "")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    checkpoint(&machine)?;
    let machine = machine.start_again()?;
    assert_ne!(machine.sh("cat /proc/sys/kernel/random/boot_id")?, boot_id);
    let boots = machine.boots();
    let _restore =
        machine.spawn(&format!("mercury restore --force-disks --module $MERCURY_MODULE {DISK}"))?;
    machine.wait_other(boots)?;
    assert_eq!(machine.sh("cat /proc/sys/kernel/random/boot_id")?, boot_id);
    let before = number(&machine, "/run/clock")?;
    machine.sh("sleep 1")?;
    assert!(number(&machine, "/run/clock")? > before);
    iommu::check(&machine)?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Restores a machine from a file, on a file system that was not mounted at the instant.
#[test]
#[ignore = "long"]
fn goes_on_from_a_file_on_a_disk() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh(&format!("mkfs.ext4 -q {DISK} && mount {DISK} /mnt && mkdir '/mnt/a folder'"))?;
    let (boot, _folder) = restart::prepare(&machine, "'/mnt/a folder/image'", "--module $MERCURY_MODULE")?;
    machine.sh("umount /mnt; sync; mount -o remount,ro /")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    machine
        .command("modprobe -r kvm_amd; mercury checkpoint - > /run/image")
        .timeout(Duration::from_secs(180))
        .run()?
        .check()?;
    machine.sh(&format!("mount {DISK} /mnt && mv /run/image '/mnt/a folder' && umount /mnt"))?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    assert_eq!(machine.sh(&format!("e2fsck -nf {DISK} > /dev/null && echo clean"))?, "clean");
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Boots a machine without writable disks that has a connection and a security association, and prepares its
/// restore.
fn encrypting() -> Result<(Machine, Boot, restart::Folder)> {
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, folder) = prepare(&machine, "--module $MERCURY_MODULE")?;
    machine.sh("sync; mount -o remount,ro /; modprobe -r kvm_amd 2> /dev/null || true")?;
    encrypt(&machine)?;
    Ok((machine, boot, folder))
}

/// Checks that the security association is still there, and that no connection has ended.
fn keys_go_on(machine: &Machine) -> Result<()> {
    let said = machine.sh("sleep 2; ip xfrm state | grep -c proto; ls /run | grep -c ended || true")?;
    assert_eq!(said, "1\n0");
    Ok(())
}

/// Restores a machine that ran on after its image was made: its second life ends connections and
/// security associations, whose counters the first life has used.
#[test]
#[ignore = "long"]
fn a_machine_that_ran_on_encrypts_nothing_twice() -> Result<()> {
    need_qemu()?;
    let (machine, boot, _folder) = encrypting()?;
    let boot_id = boot_id(&machine)?;
    image(&machine, "", DISK)?;
    keys_go_on(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    nothing_is_encrypted_twice(&machine)?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// Restores a machine that was off twice from one image. Nothing has talked when it comes back the first
/// time, and connections and keys go on. It notes that in the image. When it comes back again, it ends what
/// its first return has used.
#[test]
#[ignore = "long"]
fn a_machine_that_comes_back_twice_encrypts_nothing_twice() -> Result<()> {
    need_qemu()?;
    let (machine, boot, _folder) = encrypting()?;
    let boot_id = boot_id(&machine)?;
    checkpoint(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    let is_used = |machine: &Machine| {
        machine.sh(&format!("mercury inspect --quick --json {DISK} | grep -c '\"restored\": *true'"))
    };
    assert_eq!(is_used(&machine)?, "1");
    keys_go_on(&machine)?;
    let machine = machine.start_other(&boot)?;
    is_well(&machine, &boot_id)?;
    nothing_is_encrypted_twice(&machine)?;
    assert_eq!(is_used(&machine)?, "1");
    machine.check_next_attach()?;
    machine.ends_clean()
}

#[test]
#[ignore = "long"]
fn restores_in_place() -> Result<()> {
    comes_back_in_place(spec(Kernel::BookwormCloud))
}

/// Restores in place where the restore environment finds an IOMMU that another kernel has used.
#[test]
#[ignore = "long"]
fn restores_in_place_behind_an_iommu() -> Result<()> {
    comes_back_in_place(spec(Kernel::BookwormCloud).iommu(Iommu::Intel))
}

#[test]
#[ignore = "long"]
fn restores_in_place_with_uefi() -> Result<()> {
    comes_back_in_place(spec(Kernel::BookwormCloud).uefi())
}

/// The firmware's disk in these machines, after the image's disk.
const FIRMWARE: (Disk, &str) = (Disk::Extra(1), "/dev/vdb");

/// Boots a machine by its own firmware and this boot loader, with systemd.
fn starts_by_itself(loader: Loader, kernel: Kernel) -> Result<Machine> {
    need_qemu()?;
    let spec = spec(kernel).cpus(2).init(Init::Systemd).reset(Reset::Restarts);
    let machine = Machine::boot(loader.with(spec)?)?;
    loader.install(&machine, FIRMWARE.1)?;
    let _off = machine.spawn("poweroff")?;
    machine.wait_shutdown(Duration::from_secs(60))?;
    let disk = if loader == Loader::GrubPc { Disk::Root } else { FIRMWARE.0 };
    machine.start_by_itself(disk)
}

/// Returns the lines by which the machine's own command has entered itself in the boot menu: the
/// line that restores the machine, and the command that selects it for the next start.
fn enters_the_menu(machine: &Machine, folder: &str) -> Result<[String; 2]> {
    let line =
        format!("mercury restore --json --prepare {folder} --boot-menu --module $MERCURY_MODULE {DISK}");
    let said: serde_json::Value = serde_json::from_str(&machine.sh(&line)?).unwrap();
    Ok(["title", "once"].map(|name| said["boot_menu"][name].as_str().unwrap().to_owned()))
}

/// A command that makes the file systems on disks read-only, so that they do not change until the
/// machine crashes.
const ONLY_READ: &str =
    "journalctl --relinquish-var; umount /boot/efi 2> /dev/null; sync; mount -o remount,ro /";

/// Checks that a machine that panics boots its usual system.
fn starts_as_ever(machine: &Machine, before: &str) -> Result<()> {
    let boots = machine.boots();
    machine.crash()?;
    machine.wait_reboot(boots)?;
    assert_ne!(restart::boot_id(machine)?, before);
    // The console still shows the panic.
    machine.mercury("attach")?;
    machine.mercury("detach").map(drop)
}

/// Restores a machine that is off at the instant once, by the entry that was chosen for its next
/// start. Later starts are as usual.
fn comes_back_once(machine: Machine, folder: &str) -> Result<()> {
    start(&machine, "clock", CLOCK, "")?;
    let [_, once] = enters_the_menu(&machine, folder)?;
    // The firmware's partition is a whole disk, and has no partition type.
    machine.sh(&format!("export SYSTEMD_RELAX_ESP_CHECKS=1; {once}"))?;
    let boot_id = restart::boot_id(&machine)?;
    checkpoint(&machine)?;
    let machine = machine.start_to_be_brought_back()?;
    is_well(&machine, &boot_id)?;
    starts_as_ever(&machine, &boot_id)
}

fn comes_back_by_grub(kernel: Kernel) -> Result<()> {
    let machine = starts_by_itself(Loader::GrubEfi, kernel)?;
    machine.sh("grep BOOT_IMAGE= /proc/cmdline")?;
    comes_back_once(machine, "/boot/mercury")
}

#[test]
#[ignore = "long"]
fn comes_back_by_grub_with_uefi() -> Result<()> {
    comes_back_by_grub(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn comes_back_by_grub_with_uefi_on_6_12() -> Result<()> {
    comes_back_by_grub(Kernel::TrixieCloud)
}

/// Restores by systemd-boot, with the firmware's partition that belongs to the loader mounted at
/// the instant.
#[test]
#[ignore = "long"]
fn comes_back_by_systemd_boot() -> Result<()> {
    let machine = starts_by_itself(Loader::SystemdBoot, Kernel::BookwormCloud)?;
    machine.sh("ls /sys/firmware/efi/efivars/LoaderInfo-*; findmnt /boot/efi")?;
    comes_back_once(machine, "/boot/efi/mercury")
}

/// Restores a machine by itself as often as it crashes, until the operator ends that, since no disk
/// is written to.
#[test]
#[ignore = "long"]
fn comes_back_unattended_by_grub_with_a_bios() -> Result<()> {
    let machine = starts_by_itself(Loader::GrubPc, Kernel::BookwormCloud)?;
    machine.sh("grep BOOT_IMAGE= /proc/cmdline")?;
    start(&machine, "clock", CLOCK, "")?;
    let [title, _] = enters_the_menu(&machine, "/boot/mercury")?;
    machine.sh(&format!("grub-set-default '{title}'"))?;
    machine.sh(ONLY_READ)?;
    let boot_id = restart::boot_id(&machine)?;
    image(&machine, "", DISK)?;
    let mut machine = machine;
    for _ in 0..2 {
        machine.crash()?;
        machine = machine.start_to_be_brought_back()?;
        is_well(&machine, &boot_id)?;
    }
    machine.sh("mount -o remount,rw / && grub-set-default 0 && sync")?;
    starts_as_ever(&machine, &boot_id)
}

/// Writes an image to a disk, and returns the command's report.
fn image(machine: &Machine, options: &str, disk: &str) -> Result<serde_json::Value> {
    let said = machine.sh(&format!("mercury checkpoint --json {options} {disk}"))?;
    Ok(serde_json::from_str(&said).unwrap())
}

/// Returns the bytes of an image, and the number of pages that it leaves to its parent.
fn cost(report: &serde_json::Value) -> (u64, u64) {
    (report["image"].as_u64().unwrap(), report["unchanged_pages"].as_u64().unwrap())
}

/// Restores from a full image, an incremental one of an idle machine, and one of changed memory.
/// Together they are the machine at the last instant.
#[test]
#[ignore = "long"]
fn goes_on_from_incremental_images() -> Result<()> {
    need_qemu()?;
    let spec = spec(Kernel::BookwormCloud).cpus(2).reset(Reset::Restarts);
    let disks = [1024; 3].iter().fold(spec, |spec, mib| spec.disk(Bus::Virtio, *mib));
    let machine = Machine::boot(disks)?;
    let (full, idle, last) = ("/dev/vdb", "/dev/vdc", "/dev/vdd");
    machine.sh("sync; mount -o remount,ro /")?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh("head -c 64M /dev/urandom > /run/first")?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    let first = image(&machine, "", full)?;
    let second = image(&machine, &format!("--incremental={full}"), idle)?;
    println!("full {:?}, idle {:?}", cost(&first), cost(&second));
    assert_eq!((&first["parent"], &second["parent"]), (&serde_json::Value::Null, &first["identity"]));
    let pages = first["memory"].as_u64().unwrap() / 4096;
    // The command's own memory has changed, which counts in a machine as small as this.
    assert!(cost(&second).0 * 2 < cost(&first).0, "an idle machine's is not small");
    assert!(cost(&second).1 * 10 > pages * 9, "hardly anything has changed");

    machine
        .sh("head -c 16M /dev/urandom > /run/second; head -c 1M /dev/zero | dd of=/run/first conv=notrunc")?;
    let sums = machine.sh("sha256sum /run/first /run/second")?;
    for over in [full, idle] {
        is_refused_with(&machine, &format!("mercury checkpoint --incremental={idle} {over}"), "would need")?;
    }
    let clock = number(&machine, "/run/clock")?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    let _checkpoint = machine.spawn(&format!("mercury checkpoint --poweroff --incremental={idle} {last}"))?;
    machine.wait_shutdown(Duration::from_secs(180))?;

    let machine = machine.start_again()?;
    let said = machine.sh(&format!("mercury inspect {last}"))?;
    println!("{said}");
    assert!(said.contains("3 in all") && said.contains("as in its parent: "), "{said}");
    for line in [format!("restore --force-disks {last}"), format!("inspect --core /run/core {last}")] {
        is_refused_with(&machine, &format!("mercury {line}"), "is an incremental image")?;
    }
    let merge = |images: &str| format!("mercury merge {DISK} {images}");
    is_refused_with(&machine, &merge(&format!("{full} {last}")), "was made on image")?;
    is_refused_with(&machine, &merge(&format!("{full} {idle} {DISK}")), "holds one of the images")?;
    println!("{}", machine.sh(&merge(&format!("{full} {idle} {last}")))?);
    assert!(machine.sh(&format!("mercury inspect {DISK}"))?.contains("whole: "));

    let boots = machine.boots();
    let _restore =
        machine.spawn(&format!("mercury restore --force-disks --module $MERCURY_MODULE {DISK}"))?;
    machine.wait_other(boots)?;
    assert_eq!(machine.sh("cat /proc/sys/kernel/random/boot_id")?, boot_id);
    assert_eq!(machine.sh("sha256sum /run/first /run/second")?, sums);
    let before = number(&machine, "/run/clock")?;
    assert!(before > clock, "it goes on at the last instant");
    machine.sh("sleep 1")?;
    assert!(number(&machine, "/run/clock")? > before);
    assert_eq!(machine.sh("cat /run/*.wrong 2> /dev/null || true")?, "");
    // The merged image is the last one, so the next image can be made on it.
    let next = image(&machine, &format!("--incremental={DISK}"), full)?;
    println!("after the restore {:?}", cost(&next));
    assert!(cost(&next).1 * 2 > pages);
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// A command that keeps writing new files, and records each file's checksum when the file is made.
const WRITES: &str = "mkdir -p /run/data /run/sums; setsid sh -c 'i=10; until test -e /run/stop; do \
     i=$((i+1)); head -c 1M /dev/urandom > /run/data/$i; sha256sum /run/data/$i > /run/sums/$i; rm -f \
     /run/sums/$((i-8)) /run/data/$((i-8)); sleep 0.5; done; touch /run/stopped' > /dev/null 2>&1 < \
     /dev/null &";

/// Restores the last image of a series, in which each third image is full and the others are
/// incremental.
#[test]
#[ignore = "long"]
fn goes_on_from_a_series() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).cpus(2).memory_mib(2048).reset(Reset::Restarts))?;
    machine.sh("sync; mount -o remount,ro /; modprobe -r kvm_amd 2> /dev/null || true")?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh(WRITES)?;
    let boot_id = restart::boot_id(&machine)?;
    let mut series = machine
        .spawn("mercury checkpoint --every 1s --incremental --full-every 3 --keep 9 --json /run/series")?;
    series.wait_output_times("\"identity\"", 5, Duration::from_secs(500))?;
    machine.sh("pkill -INT -f '^mercury checkpoint'")?;
    let said = series.wait(Duration::from_secs(60))?.stdout;
    let reports = serde_json::Deserializer::from_str(&said).into_iter::<serde_json::Value>();
    // The last report may be about an image that was interrupted.
    let reports: Vec<_> =
        reports.map(std::result::Result::unwrap).filter(|report| report["error"].is_null()).collect();
    let of = |name: &str| reports.iter().map(|report| report[name].clone()).collect::<Vec<_>>();
    let (identities, parents) = (of("identity"), of("parent"));
    println!("bytes of {} images: {:?}", reports.len(), of("image"));
    let made_on = |number: usize| {
        if number.is_multiple_of(3) { serde_json::Value::Null } else { identities[number - 1].clone() }
    };
    assert_eq!(parents, (0..reports.len()).map(made_on).collect::<Vec<_>>());
    let images = machine.sh("ls /run/series.*")?;
    let images: Vec<_> = images.lines().collect();
    assert_eq!(images.len(), reports.len(), "nothing is left of one that was interrupted");

    let merge = format!("mercury merge {DISK} {}", images[4]);
    println!("{}", machine.command(&merge).timeout(Duration::from_secs(180)).run()?.check()?.stdout);
    let whole = machine.sh(&format!("mercury inspect {DISK}"))?;
    assert!(whole.contains("whole: ") && whole.contains(identities[4].as_str().unwrap()), "{whole}");
    let clock = number(&machine, "/run/clock")?;

    let machine = machine.start_again()?;
    let boots = machine.boots();
    let _restore =
        machine.spawn(&format!("mercury restore --force-disks --module $MERCURY_MODULE {DISK}"))?;
    machine.wait_other(boots)?;
    // The series goes on in the restored machine.
    machine.sh(
        "pkill -INT -f '^mercury checkpoint'; while pgrep -f '^mercury checkpoint'; do sleep 0.1; done",
    )?;
    let back = machine.sh("ls /run/series.*")?;
    assert!(images[..4].iter().all(|image| back.lines().any(|line| line == *image)), "{back}");
    assert!(!back.lines().any(|line| line == images[4]), "what was being written was not there yet: {back}");
    assert!(number(&machine, "/run/clock")? < clock, "it is the machine of that instant");
    machine.sh("touch /run/stop; until test -e /run/stopped; do sleep 0.1; done")?;
    println!("{}", machine.sh("cat /run/sums/* | sha256sum -c")?);
    is_well(&machine, &boot_id)?;
    machine.check_next_attach()?;
    machine.ends_clean()
}

/// A program that takes all memory, and more.
const HOG: &str = r#"
with open("/proc/meminfo") as table:
    available = next(int(line.split()[1]) for line in table if line.startswith("MemAvailable"))
room = bytearray((available + (100 << 10)) << 10)
room[::4096] = b"x" * len(room[::4096])
print(len(room))
"#;

/// Gives memory of the pool back to the system before a task is killed, and lets a pool that runs
/// low grow by the system's spare memory.
#[test]
#[ignore = "long"]
fn the_pool_shrinks_and_grows() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).cpus(2))?;
    machine.put("/run/hog.py", HOG.as_bytes(), 0o644)?;
    let slow = machine.spawn(
        "mercury checkpoint --pool 300 - 2> /run/said | (until test -e /run/go; \
        do sleep 0.1; done; cat > /dev/null)",
    )?;
    machine.sh("until mercury status --json | grep -q in-use; do sleep 0.1; done; sleep 1")?;
    machine.sh("python3 /run/hog.py")?;
    machine.sh("! dmesg | grep -i 'out of memory'; touch /run/go")?;
    slow.wait(Duration::from_secs(120))?;
    let said = machine.sh("cat /run/said")?;
    assert!(said.contains("complete"), "{said}");
    assert!(said.contains("the system got"), "{said}");

    machine.sh("head -c 200M /dev/urandom > /run/data")?;
    let _writer =
        machine.spawn("while :; do dd if=/dev/zero of=/run/data bs=64k count=3200 conv=notrunc; done")?;
    let report = image(&machine, "--pool 40", DISK)?;
    println!("{report}");
    assert!(report["added_pages"].as_u64().unwrap() > 1000, "{report}");
    assert!(machine.sh(&format!("mercury inspect {DISK}"))?.contains("whole: "));
    machine.sh("pkill dd; true")?;
    machine.check_next_attach()
}

/// Gives two machines from one image different random numbers.
#[test]
#[ignore = "long"]
fn two_of_one_image_differ() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    start(&machine, "clock", CLOCK, "")?;
    let (boot, _folder) = prepare(&machine, "--module $MERCURY_MODULE --force-disks")?;
    checkpoint(&machine)?;
    let random = |machine: &Machine| machine.sh("head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n'");
    let machine = machine.start_other(&boot)?;
    let first = random(&machine)?;
    let machine = machine.start_other(&boot)?;
    assert_ne!(random(&machine)?, first);
    Ok(())
}

/// A command that waits for the end of the undo process.
const UNDO_ENDS: &str =
    "for i in $(seq 300); do pgrep -f 'exe [u]ndo' > /dev/null || exit 0; sleep 0.1; done; exit 1";

fn is_refused_with(machine: &Machine, line: &str, reason: &str) -> Result<()> {
    let output = machine.run(line)?;
    assert!(
        !output.success() && output.stderr.contains(reason),
        "{line}: {}{}",
        output.stdout,
        output.stderr
    );
    Ok(())
}

fn fails_with(machine: &Machine, line: &str, reason: &str) -> Result<()> {
    is_refused_with(machine, line, reason)?;
    is_as_before(machine)
}

/// Checks that the machine is native, no task is frozen, and nothing is held. Another file system may have a
/// disk that does not answer, for which `sync` would wait.
fn is_as_before(machine: &Machine) -> Result<()> {
    let status = machine.sh("mercury status --json")?;
    assert!(!status.contains("\"attached\""), "{status}");
    machine.sh("echo x > /root/x && sync -f /root && ! ls /sys/fs/cgroup | grep mercury")?;
    Ok(())
}

/// Leaves the machine as it was after each failure, without half an image.
#[test]
fn a_failure_changes_nothing() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    start(&machine, "clock", CLOCK, "")?;
    machine.sh("mkdir -p /run/small && mount -t tmpfs -o size=3m none /run/small")?;
    fails_with(&machine, "mercury checkpoint /run/small/x", "No space left")?;
    assert_eq!(machine.sh("ls /run/small")?, "");
    fails_with(&machine, "mercury checkpoint /root/x", "must not change")?;
    fails_with(&machine, "mercury checkpoint --hook 'exit 3' /run/x", "the hook failed")?;
    // The command is killed while everything is frozen: the undo process thaws it.
    let killed = machine.run("mercury checkpoint --hook 'kill -9 $PPID; sleep 1' /run/x")?;
    assert!(!killed.success());
    machine.sh(UNDO_ENDS)?;
    is_as_before(&machine)?;
    fails_with(&machine, "mercury checkpoint /nowhere/x", "cannot be written to")?;
    fails_with(&machine, "mercury checkpoint --pool 1 /run/x", "snapshot-pool")?;
    fails_with(&machine, "mercury inspect /etc/passwd", "no image of a machine")?;
    fails_with(&machine, "mercury restore /etc/passwd", "no image of a machine")?;
    fails_with(&machine, "mercury restore /run/clock", "its type is tmpfs")?;
    fails_with(&machine, "mercury restore /dev/null", "neither a file nor a block device")?;
    fails_with(&machine, &format!("mercury restore {DISK}"), "no image of a machine")?;
    fails_with(&machine, "mercury checkpoint /dev/nvme0n1", "Device or resource busy")?;
    fails_with(&machine, "mercury checkpoint /dev/null", "neither a file nor a block device")?;
    fails_with(&machine, "mercury checkpoint --poweroff -", "would stand still")?;
    assert_eq!(machine.sh("ls /run/x* 2> /dev/null || true")?, "");

    // The command names a driver that does not stop its device.
    load_test_module(&machine)?;
    kernel(&machine, "refuse 1")?;
    fails_with(&machine, "mercury checkpoint /run/x", "device mercury_refuser")?;
    kernel(&machine, "refuse 0")?;

    // Images are made one after the other, of which the last two are kept.
    let series = machine.spawn("mercury checkpoint --every 1s --keep 2 --json /run/series")?;
    machine.sh(
        "for i in $(seq 900); do test $(ls /run/series.* | grep -vc part) = 2 && break; sleep 0.1; done",
    )?;
    machine.sh("sleep 12; pkill -INT -f '^mercury checkpoint'")?;
    let _ = series.wait(Duration::from_secs(60))?;
    assert_eq!(machine.sh("ls /run/series.* | wc -l")?, "2");
    assert!(
        machine.sh("mercury inspect $(ls /run/series.* | head -1); rm /run/series.*")?.contains("whole: ")
    );

    // A second command at the same time, then Ctrl-C, then a kill.
    let slow = "mercury checkpoint - 2> /run/said | (sleep 8; cat > /run/x)";
    let first = machine.spawn(slow)?;
    machine.sh("until mercury status --json | grep -q '\"attached\"'; do sleep 0.1; done; sleep 3")?;
    let second = machine.run("mercury checkpoint /run/y")?;
    assert!(second.stderr.contains("controls Mercury"), "{}", second.stderr);
    machine.sh("pkill -INT -f '^mercury checkpoint'")?;
    first.wait(Duration::from_secs(60))?;
    let said = machine.sh("cat /run/said; rm -f /run/x")?;
    assert!(said.contains("interrupted"), "{said}");
    is_as_before(&machine)?;

    for moment in [0, 1, 2, 3, 5] {
        let killed = machine.spawn("mercury checkpoint /run/x")?;
        machine.sh(&format!("sleep {moment}; pkill -KILL -f '^mercury checkpoint'; true"))?;
        let _ = killed.wait(Duration::from_secs(60));
        machine.sh(UNDO_ENDS)?;
        is_as_before(&machine)?;
        assert_eq!(machine.sh("ls /run/x* 2> /dev/null || true")?, "", "after {moment} s");
    }
    let before = number(&machine, "/run/clock")?;
    machine.sh("sleep 1")?;
    assert!(number(&machine, "/run/clock")? > before);
    machine.check_next_attach()
}

/// Handles or names what neither the table of mounts nor memory shows.
#[test]
fn odd_machines_are_handled_or_named() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    swapped_out_memory_is_read_back(&machine)?;
    hidden_file_systems_are_named(&machine)?;
    suspended_volumes_do_not_matter(&machine)?;
    servers_stand_still_after_their_clients(&machine)?;
    machine.check_next_attach()
}

/// Turns swap on a disk off before the instant and on again after it, with the swapped memory in
/// the image. The driver refuses an instant at which memory is swapped out, whatever the command
/// has checked before.
fn swapped_out_memory_is_read_back(machine: &Machine) -> Result<()> {
    machine.sh(&format!("mkswap -q {DISK} && swapon -p 7 {DISK}"))?;
    start(machine, "swapped", SWAPPED, "")?;
    let used = || machine.sh("awk 'NR > 1 { print $4, $5 }' /proc/swaps");
    let before = used()?;
    assert!(before.ends_with(" 7") && !before.starts_with("0 "), "{before}");
    machine.sh("mercury attach")?;
    let refused = machine.run("mercury-workload snapshot --pool-pages 20000 --rounds 1")?;
    assert!(!refused.success() && refused.stdout.contains("snapshot-swap"), "{refused:?}");
    machine.sh("mercury detach")?;
    let hook = format!("mercury checkpoint --hook 'swapon -p 7 {DISK}' /run/x");
    fails_with(machine, &hook, "was switched on or off meanwhile")?;
    let said = machine.run("mercury checkpoint /run/x && rm /run/x")?.check()?.stderr;
    assert!(!said.contains("are read back"), "the one before has: {said}");
    assert_eq!(used()?, "0 7");
    start(machine, "again", SWAPPED, "")?;
    let said = machine.run("mercury snapshot --force-disks")?.check()?.stderr;
    assert!(said.contains("are read back"), "{said}");
    assert_eq!(used()?, "0 7");
    machine.sh("mercury snapshot --drop && mercury detach")?;
    machine.sh(
        "touch /run/look; until grep -q '[23]' /run/swapped && grep -q '[23]' /run/again; do sleep 0.1; done",
    )?;
    for name in ["swapped", "again"] {
        assert_eq!(number(machine, &format!("/run/{name}"))?, 2);
    }
    limited_groups_keep_their_programs(machine)?;
    machine.sh(&format!("swapoff {DISK}")).map(drop)
}

/// Refuses by name if a control group has no room for its swapped-out pages: the kernel would end its
/// program. With room, the pages are read back.
fn limited_groups_keep_their_programs(machine: &Machine) -> Result<()> {
    const GROUP: &str = "/sys/fs/cgroup/limited";
    machine
        .sh(&format!("rm /run/look; echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir {GROUP}"))?;
    let enter = format!("open('{GROUP}/cgroup.procs', 'w').write('0')\n");
    start(machine, "limited", &format!("{enter}{SWAPPED}"), "")?;
    // Pages that are in memory as well, as the swap cache, need no room.
    machine.sh(&format!(
        "cd {GROUP}; echo 64M > memory.reclaim || true; cached=$(sed -n 's/^swapcached //p' memory.stat); \
         test $(($(cat memory.swap.current) - cached)) -ge 8000000; \
         echo $(($(cat memory.current) + 4194304)) > memory.max"
    ))?;
    let said = machine.run("mercury doctor")?;
    assert!(said.stdout.contains("control group /limited may have"), "{}", said.stdout);
    fails_with(machine, "mercury checkpoint /run/x", "control group /limited may have")?;
    assert_eq!(number(machine, "/run/limited")?, 1, "the program lives");
    machine.sh(&format!("echo max > {GROUP}/memory.max; mercury checkpoint /run/x && rm /run/x"))?;
    machine.sh("touch /run/look; until grep -q '[23]' /run/limited; do sleep 0.1; done")?;
    assert_eq!(number(machine, "/run/limited")?, 2);
    machine.sh(&format!("grep -q '^oom_kill 0' {GROUP}/memory.events; sleep 1; rmdir {GROUP}")).map(drop)
}

/// A thread with a mount namespace of its own, and a file system mounted in it.
const THREAD: &str = r#"
import ctypes, threading, time
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
libc = ctypes.CDLL(None)
def live():
    libc.unshare(CLONE_NEWNS)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    assert libc.mount(b"/dev/vda", b"/mnt", b"ext4", 0, None) == 0
    say(1)
    time.sleep(10000)
threading.Thread(target=live).start()
"#;

/// A file system that is mounted nowhere, but in a descriptor.
const FSMOUNT: &str = r#"
import ctypes, time
FSOPEN, FSCONFIG, FSMOUNT, SET_STRING, CREATE = 430, 431, 432, 1, 6
call = ctypes.CDLL(None).syscall
context = call(FSOPEN, b"ext4", 0)
assert call(FSCONFIG, context, SET_STRING, b"source", b"/dev/vda", 0) == 0
assert call(FSCONFIG, context, CREATE, None, None, 0) == 0
assert call(FSMOUNT, context, 0, 0) >= 0
say(1)
time.sleep(10000)
"#;

/// A mount namespace that no process is in: another process has a descriptor of it.
const NAMESPACE: &str = r#"
import ctypes, os, time
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
libc = ctypes.CDLL(None)
is_mounted, mounted = os.pipe()
child = os.fork()
if child == 0:
    libc.unshare(CLONE_NEWNS)
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    assert libc.mount(b"/dev/vda", b"/mnt", b"ext4", 0, None) == 0
    os.write(mounted, b"x")
    time.sleep(10000)
os.read(is_mounted, 1)
held = os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY)
os.kill(child, 9)
os.waitpid(child, 0)
say(1)
time.sleep(10000)
"#;

/// Names a file system that `umount -l` has left in use, or that only a thread, a descriptor or a
/// namespace without a process has mounted, with the known tasks that use it.
fn hidden_file_systems_are_named(machine: &Machine) -> Result<()> {
    machine.sh(&format!(
        "mkfs.ext4 -qF {DISK}; mount {DISK} /mnt; setsid sleep 10000 > /mnt/x < /dev/null 2>&1 & sleep 1; \
         umount -l /mnt"
    ))?;
    for line in
        ["checkpoint /run/x", "snapshot --force-disks", "checkpoint --poweroff --force-devices /run/x"]
    {
        fails_with(machine, &format!("mercury {line}"), &format!("{DISK} (ext4, used by sleep ("))?;
    }
    machine.sh("pkill -f '^sleep 10000'; while test -e /sys/fs/ext4/vda; do sleep 0.1; done")?;
    start(machine, "thread", THREAD, "")?;
    fails_with(machine, "mercury checkpoint /run/x", &format!("/mnt ({DISK}) of thread "))?;
    machine.sh("pkill -f '^python3 /run/thread.py'; while test -e /sys/fs/ext4/vda; do sleep 0.1; done")?;
    for (name, script) in [("fsmount", FSMOUNT), ("namespace", NAMESPACE)] {
        start(machine, name, script, "")?;
        for line in ["checkpoint /run/x", "checkpoint --poweroff --force-devices /run/x"] {
            let refused = machine.run(&format!("mercury {line}"))?;
            println!("{name}: {}", refused.stderr);
            fails_with(machine, &format!("mercury {line}"), &format!("{DISK} (ext4, "))?;
        }
        machine.sh(&format!(
            "pkill -f '^python3 /run/{name}.py'; while test -e /sys/fs/ext4/vda; do sleep 0.1; done"
        ))?;
    }
    image(machine, "", "/run/x")?;
    machine.sh("rm /run/x").map(drop)
}

/// Finishes although a read from a suspended device-mapper device would wait until its resume. The
/// command asks all devices if they hold one of the machine's file systems.
fn suspended_volumes_do_not_matter(machine: &Machine) -> Result<()> {
    machine.sh("modprobe dm-mod; dmsetup create idle --noudevsync --table '0 2048 error'; \
         dmsetup suspend --noudevsync idle")?;
    fails_with(
        machine,
        "mercury checkpoint --poweroff --hook 'exit 3' /dev/vda --overwrite",
        "the hook failed",
    )?;
    machine.sh("dmsetup remove --noudevsync idle").map(drop)
}

/// A FUSE server with one slow file.
const FUSE: &str = r#"
import ctypes, os, struct, time
server = os.open("/dev/fuse", os.O_RDWR)
os.makedirs("/run/served")
options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
assert ctypes.CDLL(None).mount(b"lab", b"/run/served", b"fuse", 0, options.encode()) == 0
say(1)
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE = 1, 2, 3, 14, 15, 18
FLUSH, INIT, INTERRUPT, BATCH_FORGET = 25, 26, 36, 42
SIZE, DIRECT_IO, ENOSYS = 1 << 30, 1, 38
def attributes(node):
    mode, links = (0o40755, 2) if node == 1 else (0o100644, 1)
    return struct.pack("<6Q10I", node, SIZE, SIZE >> 9, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)
while True:
    request = os.read(server, 1 << 18)
    _, operation, unique, node = struct.unpack_from("<IIQQ", request)
    error, answer = 0, b""
    if operation in (FORGET, INTERRUPT, BATCH_FORGET):
        continue
    elif operation == INIT:
        answer = struct.pack("<IIIIHHIIHHI28x", 7, 31, 65536, 0, 12, 10, 65536, 1, 0, 0, 0)
    elif operation == LOOKUP:
        answer = struct.pack("<QQQQII", 2, 0, 60, 60, 0, 0) + attributes(2)
    elif operation == GETATTR:
        answer = struct.pack("<QII", 60, 0, 0) + attributes(node)
    elif operation == OPEN:
        answer = struct.pack("<QII", 1, DIRECT_IO, 0)
    elif operation == READ:
        time.sleep(0.05)
        answer = b"x" * struct.unpack_from("<QQI", request, 40)[2]
    elif operation not in (RELEASE, FLUSH):
        error = -ENOSYS
    os.write(server, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)
"#;

/// A process that reads that file all the time.
const READER: &str = r#"
import os
file, count = os.open("/run/served/file", os.O_RDONLY), 0
while True:
    assert os.pread(file, 4096, 0) == b"x" * 4096
    count += 1
    say(count)
"#;

/// A read that waits for a page that never comes. Beside it, a counter of the milliseconds for
/// which it stood still.
const PAGE: &str = r#"
import ctypes, fcntl, mmap, os, struct, threading, time
USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER, MISSING = 323, 0xC018AA3F, 0xC020AA00, 1
handler = ctypes.CDLL(None).syscall(USERFAULTFD, os.O_CLOEXEC)
fcntl.ioctl(handler, UFFDIO_API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(handler, UFFDIO_REGISTER, bytearray(struct.pack("<QQQQ", address, 4096, MISSING, 0)))
zero = os.open("/dev/zero", os.O_RDONLY)
threading.Thread(target=lambda: os.readv(zero, [memory]), daemon=True).start()
time.sleep(1)
last, still = time.monotonic(), 1
while True:
    say(still)
    time.sleep(0.01)
    now = time.monotonic()
    if now - last > 0.2:
        still += int((now - last) * 1000)
    last = now
"#;

/// Freezes servers after their clients, since a client that waits for a frozen server cannot be
/// frozen.
fn servers_stand_still_after_their_clients(machine: &Machine) -> Result<()> {
    machine.sh("modprobe fuse")?;
    start(machine, "fuse", FUSE, "")?;
    for name in ["reader", "other"] {
        start(machine, name, READER, "")?;
    }
    for _ in 0..3 {
        fails_with(machine, "mercury checkpoint --hook 'exit 3' /run/x", "the hook failed")?;
    }
    comes_further(machine, "reader", count(machine, "reader")?)?;
    // The server ends with its file system.
    machine.sh("pkill -f '^python3 /run/(reader|other).py'; umount -l /run/served").map(drop)
}

/// Names a task that cannot be frozen, without freezing the others for long.
#[test]
#[ignore = "long"]
fn a_task_that_waits_for_a_page_is_named() -> Result<()> {
    need_qemu()?;
    let machine = &Machine::boot(spec(Kernel::BookwormCloud))?;
    start(machine, "page", PAGE, "")?;
    let refused = machine.run("mercury checkpoint /run/x")?;
    println!("{}", refused.stderr);
    let named = ["these tasks do not come to rest: python3 (", "userfaultfd"];
    assert!(named.iter().all(|words| refused.stderr.contains(words)), "{}", refused.stderr);
    is_as_before(machine)?;
    let still = number(machine, "/run/page")?;
    println!("it stood still for {still} ms");
    assert!((1..2000).contains(&still), "{still} ms");
    machine.sh("pkill -9 -f '^python3 /run/page.py'")?;
    machine.check_next_attach()
}

/// Names a file system whose device does not answer, before anything is frozen.
#[test]
#[ignore = "long"]
fn a_disk_that_does_not_answer_is_named() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud))?;
    machine.sh(&format!(
        "modprobe dm-mod; dmsetup create slow --noudevsync --table \"0 $(blockdev --getsz {DISK}) linear \
         {DISK} 0\"; dmsetup mknodes slow; mkfs.ext4 -q /dev/mapper/slow; mount /dev/mapper/slow /mnt; \
         echo x > /mnt/x; dmsetup suspend --nolockfs --noudevsync slow"
    ))?;
    for line in ["mercury checkpoint /run/x", "mercury snapshot --force-disks"] {
        let refused = machine.run(line)?;
        println!("{}", refused.stderr);
        assert!(
            refused.stderr.contains("could not be written: it has not answered for"),
            "{}",
            refused.stderr
        );
        assert!(refused.stderr.contains("/mnt (/dev/mapper/slow)"), "{}", refused.stderr);
        is_as_before(&machine)?;
    }
    machine.sh("dmsetup resume --noudevsync slow")?;
    is_as_before(&machine)?;
    machine.sh("umount /mnt; dmsetup remove --noudevsync slow")?;
    a_server_that_is_gone_is_named(&machine)?;
    machine.check_next_attach()
}

/// Names a file system on an NBD server that does not answer any more, and an unused disk of that server.
fn a_server_that_is_gone_is_named(machine: &Machine) -> Result<()> {
    start(machine, "blocks", BLOCKS, "")?;
    machine.sh("ip link set lo up; modprobe nbd nbds_max=2")?;
    start(machine, "attach_blocks", ATTACH_BLOCKS, "127.0.0.1")?;
    machine.sh("while pgrep -f '[a]ttach_blocks'; do sleep 0.1; done; mkfs.ext4 -q /dev/nbd0 && mount \
        /dev/nbd0 /mnt; echo x > /mnt/x; sync -f /mnt")?;
    // A new file would have the shell wait: its inode's bitmap is read from the server.
    machine.sh("pkill -STOP -f '^python3 /run/blocks.py'; echo y >> /mnt/x")?;
    fails_with(
        machine,
        "mercury checkpoint /run/x",
        "/mnt (/dev/nbd0) could not be written: it has not answered for",
    )?;
    machine.sh("pkill -CONT -f '^python3 /run/blocks.py'; until umount /mnt; do sleep 0.2; done")?;
    // The disk might be one with the root's identity, although nobody uses it.
    machine.sh("pkill -STOP -f '^python3 /run/blocks.py'; echo 3 > /proc/sys/vm/drop_caches")?;
    fails_with(
        machine,
        &format!("mercury checkpoint --poweroff --overwrite {DISK}"),
        "/dev/nbd0 cannot be read: it has not answered for",
    )?;
    machine.sh("pkill -CONT -f '^python3 /run/blocks.py'").map(drop)
}

/// Names the disk of an image, or of a machine to receive, that does not answer; also when it stops
/// to answer while an image is written to it.
#[test]
#[ignore = "long"]
fn an_images_disk_that_does_not_answer_is_named() -> Result<()> {
    need_qemu()?;
    let machine = Machine::boot(spec(Kernel::BookwormCloud).nic(Nic::Virtio))?;
    machine.sh(NETWORK)?;
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    // A disk that may transfer a byte in a second answers one request, and no other.
    let answers = |it_does: bool| -> Result<()> {
        let bytes = if it_does { 0 } else { 1 };
        machine.qmp()?.human(&format!("block_set_io_throttle disk0 {bytes} 0 0 0 0 0")).map(drop)
    };
    let direct = format!("dd if={DISK} of=/dev/null bs=4k count=1 iflag=direct");
    answers(false)?;
    machine.sh(&format!("{direct}; echo 3 > /proc/sys/vm/drop_caches"))?;
    for (line, reason) in [
        (format!("mercury receive --disk {DISK}"), format!("{DISK}: it has not answered for")),
        (
            format!("mercury checkpoint {DISK}"),
            format!("{DISK} cannot be written to: it has not answered for"),
        ),
        (format!("mercury restore {DISK}"), format!("{DISK} has not answered for")),
        (format!("mercury inspect {DISK}"), format!("{DISK} has not answered for")),
    ] {
        let begun = Instant::now();
        fails_with(&machine, &line, &reason)?;
        println!("{line}: {:.0} s", begun.elapsed().as_secs_f64());
    }
    answers(true)?;
    let writing = machine.spawn(&format!("mercury checkpoint {DISK}"))?;
    machine.sh("until mercury status --json | grep -q '\"attached\"'; do sleep 0.1; done; sleep 2")?;
    answers(false)?;
    let said = writing.wait(Duration::from_secs(300))?;
    println!("{}", said.stderr);
    assert!(
        !said.success() && said.stderr.contains(&format!("{DISK} has not answered for")),
        "{}",
        said.stderr
    );
    answers(true)?;
    is_as_before(&machine)?;
    machine.sh(&format!("mercury checkpoint {DISK}"))?;
    machine.check_next_attach()
}
