//! Snapshots of memory under machines at work. By the hypervisor's own hashes every page that is
//! read has its content of the instant, whatever devices write meanwhile.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{fs, process::Command, time::Duration};

use mercury_lab::{
    Bus, Disk, Iommu, Kernel, Machine, Model, Nic, Platform, Qemu, Result, Spec, Vendor,
    artefacts::build_program, driver::Variant, iommu, is_full,
};
use object::{
    Endianness, elf,
    read::elf::{ElfFile64, ProgramHeader},
};
use serde_json::json;
use workloads::devices::{self, Devices, with_balloon};
use workloads::readers::{
    FRESH_CARD, REAL_DRIVERS, disk_load, give_address, network_load, real_hardware, source,
};
use workloads::{kernel, load_test_module};

const LIMIT: Duration = Duration::from_secs(180);

/// Direct and buffered reads, with the caches dropped in between: devices write to fresh pages, and
/// to the same ones again.
const ROOT_LOAD: &str = "cat /bin/* > /dev/null; echo 3 > /proc/sys/vm/drop_caches; \
     dd if=/dev/zero of=/root/x bs=1M count=20 oflag=direct status=none; \
     dd if=/root/x of=/dev/null iflag=direct bs=1M status=none";

/// A command for when no data has come for a while: nothing, since the emulator may be slow.
const PATIENCE: &str = "test $? -eq 124";

/// A command that delays many small packets by some seconds: longer than the machine takes to stand
/// still.
const PACKETS_THAT_WAIT: &str = "tc qdisc replace dev \
     $(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1) root netem \
     delay 3s; for i in $(seq 200); do echo $i > /dev/udp/10.0.2.2/9 || true; done";

fn are_exact(spec: Spec, modules: &str, loads: &[String], rounds: u32) -> Result<()> {
    proves(&format!("snapshot --pool-pages 100000 --rounds {rounds}"), spec, modules, loads)
}

/// Runs the workload's proof under these loads.
fn proves(what: &str, spec: Spec, modules: &str, loads: &[String]) -> Result<()> {
    need_nested_faults()?;
    let uses = |what: &str| loads.iter().any(|load| load.contains(what));
    let machine = Machine::boot(with_hashes(spec))?;
    for module in modules.split_whitespace() {
        machine.sh(&format!("modprobe {module}"))?;
    }
    if uses("10.0.2.2") {
        give_address(&machine)?;
    }
    let _work = machine.start_work()?;
    machine.mercury("attach")?;
    let mut running = Vec::new();
    for load in loads {
        running.push(machine.spawn(&format!("while test ! -e /run/end; do {{ {load}; }} || exit 1; done"))?);
    }
    println!("{}", machine.sh(&format!("mercury-workload {what}"))?);
    for load in &mut running {
        assert!(!load.has_ended()?, "{:?}", load.errors_so_far());
    }
    for (protocol, counter, enough) in [("tcp", "rx_bytes", 1 << 20), ("udp", "tx_packets", 1000)] {
        let count = machine.sh(&format!("cat /sys/class/net/*/statistics/{counter} | sort -n | tail -1"))?;
        assert!(!uses(protocol) || count.parse::<u64>().unwrap() > enough, "{count} {counter}");
    }
    machine.sh("touch /run/end")?;
    iommu::check(&machine)?;
    machine.check_next_attach()
}

fn virtio() -> Spec {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).nic(Nic::Virtio).disk(Bus::Virtio, 256);
    ["virtio-balloon-pci", "virtio-rng-pci", "virtio-serial-pci"]
        .iter()
        .fold(spec, |spec, device| spec.qemu_arg("-device").qemu_arg(device))
}

fn virtio_at_work(spec: Spec) -> Result<()> {
    let loads = [
        ROOT_LOAD.to_owned(),
        disk_load("/dev/vda"),
        network_load(source(), PATIENCE),
        "head -c 100000 /dev/hwrng > /dev/null; sleep 0.1".to_owned(),
    ];
    are_exact(
        spec,
        "virtio_net virtio_balloon virtio_rng virtio_console",
        &loads,
        if is_full() { 4 } else { 1 },
    )
}

/// Returns a function that finds `phys` in a core.
fn place_in(core: &[u8]) -> impl Fn(u64) -> Option<usize> {
    let endian = Endianness::Little;
    let file = ElfFile64::<Endianness>::parse(core).unwrap();
    let segments = file.elf_program_headers().iter().filter(|segment| segment.p_type(endian) == elf::PT_LOAD);
    let segments: Vec<_> = segments
        .map(|segment| (segment.p_paddr(endian), segment.p_filesz(endian), segment.p_offset(endian)))
        .collect();
    move |phys| {
        let (start, _, offset) =
            segments.iter().find(|(start, size, _)| phys >= *start && phys - start < *size)?;
        Some((phys - start + offset) as usize)
    }
}

/// Debian's default: pages are zeroed before devices get them, which hides late writes of devices.
const ZEROED: bool = true;

fn need_nested_faults() -> Result<()> {
    if Platform::chosen()? == Platform::Qemu {
        return Ok(());
    }
    // Bochs's SVM forgets interrupts whose delivery makes a nested fault.
    Platform::need(Vendor::Intel, "this SVM reports no interrupts in delivery")
}

/// Selects the newer QEMU. QEMU 7 runs stale copies of code that the kernel has patched: DMA goes
/// unseen then, or the machine hangs.
fn with_hashes(spec: Spec) -> Spec {
    spec.modules(Variant::Faults).qemu_version(Qemu::Newer)
}

/// Checks that the image on the disk has every page as the hypervisor has hashed it at the instant.
/// Devices are at work before, after, and while the image is written.
fn image_is_exact(devices: Devices, zeroed: bool) -> Result<()> {
    need_nested_faults()?;
    Platform::need(Vendor::Amd, "Bochs has no disk for the image")?;
    let number = devices.disks;
    // The only other virtio disk is the image's, or the artefacts'.
    let small = |spec: Spec| spec.memory_mib(768).disk(Bus::Virtio, 1024);
    let devices = devices.zeroed(zeroed).with(with_hashes).with(small);
    let machine = devices.boot()?;
    let write = || {
        machine.sh("mercury checkpoint --module $MERCURY_MODULE --hook true --hashes /run/hashes /dev/vdb")
    };
    println!("{}", if devices.has_balloon() { with_balloon(&machine, write)? } else { write()? });
    devices.go_on(&machine)?;
    devices.end(&machine)?;
    iommu::check(&machine)?;
    let hashes = machine.get("/run/hashes")?;
    let folder = std::env::temp_dir().join(format!("mercury-exact-{}", machine.pid()));
    fs::create_dir_all(&folder).unwrap();
    let (image, core) = (folder.join("image"), folder.join("core"));
    machine.keep_disks()?.save(Disk::Extra(number), &image)?;
    let mut inspect = Command::new(build_program("mercury-cli", "mercury")?);
    let inspect = inspect.arg("inspect").arg("--core").arg(&core).arg(&image).status().unwrap();
    let core = fs::read(&core);
    fs::remove_dir_all(&folder).unwrap();
    assert!(inspect.success());
    let core = core.unwrap();
    let (pairs, rest) = hashes.as_chunks::<16>();
    let place = place_in(&core);
    let wrong: Vec<_> = pairs
        .iter()
        .map(|pair| {
            let (phys, hash) = pair.split_at(8);
            [phys, hash].map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        })
        .filter(|[phys, expected]| {
            let at = place(*phys).unwrap_or_else(|| panic!("{phys:#x} is not in the core"));
            let (words, _) = core[at..at + 4096].as_chunks::<8>();
            let words: Vec<_> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            mercury_abi::snapshot::hash(&words) != *expected
        })
        .collect();
    println!("{} pages of the image are compared", pairs.len());
    assert!(pairs.len() > 20_000 && rest.is_empty(), "{} pages", pairs.len());
    assert!(wrong.is_empty(), "{} pages are not what they were: {:x?}", wrong.len(), wrong.first());
    Ok(())
}

macro_rules! images {
    ($($name:ident = $devices:expr, $zeroed:expr;)+) => {
        $(#[test] #[ignore = "long"] fn $name() -> Result<()> { image_is_exact($devices, $zeroed) })+
    };
}

images! {
    the_image_is_exact = devices::virtio(), ZEROED;
    the_image_is_exact_where_pages_are_not_zeroed = devices::virtio(), !ZEROED;
    the_image_is_exact_with_real_hardware = devices::real_hardware(), !ZEROED;
    the_image_is_exact_behind_amds_iommu = behind(Iommu::Amd), !ZEROED;
    the_image_is_exact_behind_intels_iommu = behind(Iommu::Intel), !ZEROED;
}

/// Describes devices behind an IOMMU. Their addresses are no memory addresses, and the IOMMU itself
/// writes to memory, also when it resumes.
fn behind(iommu: Iommu) -> Devices {
    devices::real_hardware().with(|spec| spec.iommu(iommu))
}

#[test]
fn exact_with_virtio() -> Result<()> {
    virtio_at_work(virtio())
}

/// Makes an exact image where pages are not zeroed before devices get them. Debian zeroes them,
/// which hides late writes of devices.
#[test]
#[ignore = "long"]
fn exact_where_pages_are_not_zeroed() -> Result<()> {
    let spec = Spec::new(Kernel::TrixieCloud).cpus(4).kernel_arg("init_on_alloc=0");
    are_exact(spec, "", &[ROOT_LOAD.to_owned()], 3)
}

/// Makes an exact image with packets that were made before the instant and are sent after it: this
/// card of QEMU's writes their checksums in place.
#[test]
#[ignore = "long"]
fn exact_with_packets_that_wait() -> Result<()> {
    let spec = Spec::new(Kernel::BookwormGeneric).cpus(2).nic(Nic::E1000e).kernel_arg("init_on_alloc=0");
    are_exact(spec, "e1000e sch_netem", &[PACKETS_THAT_WAIT.to_owned()], 2)
}

/// Reads all disks of a machine, and receives over its network.
fn all_at_once(spec: Spec, rounds: u32) -> Result<()> {
    let loads = [
        ROOT_LOAD.to_owned(),
        disk_load("/dev/nvme0n1"),
        disk_load("/dev/sdb"),
        network_load(source(), FRESH_CARD),
    ];
    are_exact(spec, REAL_DRIVERS, &loads, rounds)
}

#[test]
#[ignore = "long"]
fn exact_with_ahci_nvme_usb_and_e1000e() -> Result<()> {
    all_at_once(real_hardware(), 3)
}

/// Makes exact snapshots behind AMD's IOMMU. The devices' addresses are no memory addresses, and
/// the IOMMU itself writes to memory, also when it resumes.
#[test]
#[ignore = "long"]
fn exact_behind_amds_iommu() -> Result<()> {
    all_at_once(real_hardware().iommu(Iommu::Amd), 3)
}

#[test]
#[ignore = "long"]
fn exact_behind_intels_iommu() -> Result<()> {
    all_at_once(real_hardware().iommu(Iommu::Intel), 3)
}

#[test]
#[ignore = "long"]
fn exact_with_virtio_behind_intels_iommu() -> Result<()> {
    virtio_at_work(virtio().iommu(Iommu::Intel))
}

/// Runs the same work under a dirty log, which must have the devices' writes as well.
fn log_is_whole(spec: Spec, modules: &str, loads: &[String], rounds: u32) -> Result<()> {
    proves(&format!("log --pool-pages 20000 --rounds {rounds}"), spec, modules, loads)
}

#[test]
#[ignore = "long"]
fn the_log_misses_nothing_with_virtio() -> Result<()> {
    let loads = [
        ROOT_LOAD.to_owned(),
        disk_load("/dev/vda"),
        network_load(source(), PATIENCE),
        "head -c 100000 /dev/hwrng > /dev/null; sleep 0.1".to_owned(),
    ];
    log_is_whole(virtio(), "virtio_net virtio_balloon virtio_rng virtio_console", &loads, 3)
}

/// Misses no write of devices that report when they give pages back.
#[test]
#[ignore = "long"]
fn the_log_misses_nothing_with_ahci_nvme_and_e1000e() -> Result<()> {
    let spec =
        Spec::new(Kernel::BookwormGeneric).cpus(2).root_bus(Bus::Ahci).nic(Nic::E1000e).disk(Bus::Nvme, 256);
    let loads = [ROOT_LOAD.to_owned(), disk_load("/dev/nvme0n1"), network_load(source(), FRESH_CARD)];
    log_is_whole(spec, "nvme e1000e", &loads, 3)
}

#[test]
#[ignore = "long"]
fn the_log_misses_nothing_on_a_later_kernel() -> Result<()> {
    log_is_whole(Spec::new(Kernel::TrixieCloud).cpus(4), "", &[ROOT_LOAD.to_owned()], 3)
}

/// Misses no write of CPUs under EPT. The emulator interprets all CPUs in one thread.
#[test]
#[ignore = "long"]
fn the_log_misses_nothing_on_intel() -> Result<()> {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(512);
    log_is_whole(
        spec.platform(Platform::Bochs(Model::SkylakeX)),
        "",
        &["cat /bin/* > /dev/null; sleep 0.1".to_owned()],
        1,
    )
}

/// Reads of a disk that were under way when the log began, and end after all memory has been read:
/// with virtio no driver reports that.
const SLOW_READ: &str = r#"
import mmap, os
disk = os.open("/dev/vda", os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
buffer.write(b"\xff" * len(buffer))
print("reads", flush=True)
os.preadv(disk, [buffer], 16 << 20)
print("has read", flush=True)
input()
"#;

#[test]
fn the_log_knows_what_virtio_had_before_it() -> Result<()> {
    need_nested_faults()?;
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(512).disk(Bus::Virtio, 256);
    let machine = Machine::boot(spec.modules(Variant::Faults).qemu_version(Qemu::Newer))?;
    machine.mercury("attach")?;
    machine.put("/run/slow.py", SLOW_READ.as_bytes(), 0o644)?;
    let throttle = |bytes_per_second: u64| {
        let mut limits =
            json!({"device": "disk0", "bps": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
        limits["bps_rd"] = bytes_per_second.into();
        machine.qmp()?.execute("block_set_io_throttle", limits).map(drop)
    };
    throttle(100)?;
    // QEMU lets one read pass, and delays the next.
    machine.sh("dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct status=none")?;
    let mut reader = machine.spawn("python3 /run/slow.py")?;
    reader.wait_output("reads", LIMIT)?;
    machine.sh(
        "for i in $(seq 300); do grep -q blk /proc/$(pgrep -f '^python3 /run/slow')/stack && exec sleep 1; \
         sleep 0.1; done; cat /proc/$(pgrep -f '^python3 /run/slow')/stack; exit 1",
    )?;
    let mut log = machine.spawn("mercury-workload log --rounds 1 --wait-file /run/go")?;
    log.wait_output("all of memory has been read", LIMIT)?;
    assert!(!reader.output_so_far()?.contains("has read"));
    throttle(0)?;
    reader.wait_output("has read", LIMIT)?;
    // There are more requests than the driver remembers of one queue.
    load_test_module(&machine)?;
    assert_eq!(kernel(&machine, "queue-without-pages 4000")?["added"], 1);
    machine.sh("touch /run/go")?;
    let output = log.wait(LIMIT)?.check()?;
    println!("{}", output.stdout);
    machine.check_next_attach()
}

/// A script that loads and removes a module that poses as another hypervisor, again and again. The
/// load may be refused while tasks are frozen.
const RIVALS: &str = r#"
loaded=0
until [ -e /run/end ]; do
    insmod /mercury/lib/modules/$(uname -r)/vboxdrv.ko 2> /run/refused &&
        loaded=$((loaded + 1)) && rmmod vboxdrv
    grep -v 'Device or resource busy' /run/refused && exit 1
done
echo $loaded
"#;

/// Prepares snapshots while a rival module is loaded. The loading task holds the lock of the
/// kernel's notifiers, and the driver asks, on behalf of that module, which CPUs are attached.
#[test]
#[ignore = "long"]
fn a_rival_comes_while_snapshots_are_prepared() -> Result<()> {
    need_nested_faults()?;
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(512);
    let machine = Machine::boot(spec.modules(Variant::Faults).qemu_version(Qemu::Newer))?;
    machine.mercury("attach")?;
    let rivals = machine.spawn(RIVALS)?;
    for _ in 0..3 {
        machine.mercury("snapshot --force-disks --pool 128M")?;
        machine.mercury("snapshot --drop")?;
    }
    machine.sh("touch /run/end")?;
    let loaded: u64 = rivals.wait(LIMIT)?.check()?.stdout.trim().parse().unwrap();
    assert!(loaded > 0);
    machine.check_next_attach()
}

/// WireGuard forgets its keys when a freeze begins. It is told so again when no new ones can be made any
/// more, with all tasks and their work frozen.
#[test]
#[ignore = "long"]
fn tunnels_forget_keys_that_were_made_during_the_freeze() -> Result<()> {
    need_nested_faults()?;
    let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(2))?;
    machine.sh("modprobe wireguard; ip link add wg0 type wireguard; ip link set wg0 up")?;
    let trace = "/sys/kernel/tracing";
    machine.sh(&format!("mount -t tracefs tracefs {trace} 2> /dev/null || true"))?;
    machine.sh(&format!(
        "echo 'p:told wireguard:wg_pm_notification action=%si:u64' > {trace}/kprobe_events; \
         echo 1 > {trace}/events/kprobes/enable"
    ))?;
    machine.sh("sync; mount -o remount,ro /; mercury attach > /dev/null; mercury snapshot")?;
    let told = machine.sh(&format!("grep -o 'action=[0-9]*' {trace}/trace | xargs"))?;
    // PM_HIBERNATION_PREPARE twice, then PM_POST_HIBERNATION.
    assert_eq!(told.trim(), "action=1 action=1 action=2");
    machine.sh("mercury snapshot --drop; ip link delete wg0")?;
    machine.check_next_attach()
}
