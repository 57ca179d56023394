//! A source that has moved and loses its power before it could be switched off. Switched on again,
//! it does not start from the disks that the destination has by then. Debian's own initial RAM disk
//! checks the tombstone, with the package's hook.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::{fs, path::PathBuf, thread, time::Duration};

use mercury_lab::{
    Boot, Kernel, Machine, Result, Spec,
    moving::{GOES_ON, LIMIT, PEER, Switch, migrate, plug_in, receive, said, wait_more},
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong,
        script::{CLOCK, HEAR, TALK},
        start,
    },
};
use workloads::restart::need_qemu;

/// The package's files and their places.
const FILES: [(&str, &[u8]); 4] = [
    ("/usr/share/initramfs-tools/hooks/mercury", include_bytes!("../../packaging/initramfs/hook")),
    (
        "/usr/share/initramfs-tools/scripts/init-premount/mercury-tombstone",
        include_bytes!("../../packaging/initramfs/script"),
    ),
    ("/etc/initramfs-tools/scripts/lab", include_bytes!("../guest/tombstones/root")),
    ("/root/make-initramfs", include_bytes!("../guest/tombstones/initramfs")),
];

/// The message of the system that would have started.
const BEGINS: &str = "lab: the root is there";
const STAYS: &str = "Two machines with the same disks destroy them";
/// Time limit for a system to come to its root.
const START: Duration = Duration::from_secs(240);

/// The place of the tombstone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Firmware,
    Disk,
}

impl Place {
    /// Describes a machine that has such a place.
    fn with(self, spec: Spec, files: &Files, name: &str) -> Spec {
        if self == Self::Firmware {
            return spec.uefi_with_variables();
        }
        // A raw copy: a layer of qcow2 would lose in a power cut where it has put the writes.
        let disk = files.path(name);
        if !disk.exists() {
            fs::File::create_new(&disk).and_then(|file| file.set_len(64 << 20)).unwrap();
        }
        let drive = format!("if=none,id=own,file={},format=raw", disk.display());
        let words = ["-drive", &drive, "-device", "virtio-blk-pci,drive=own"];
        words.into_iter().fold(spec, Spec::qemu_arg)
    }
}

/// A folder of this host, which goes when this value is dropped.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("mercury-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Makes an initial RAM disk as Debian does. Returns the system that starts the machine with it.
fn debians(switch: &Machine, machine: &Machine, files: &Files) -> Result<Boot> {
    switch.sh("mkdir -p /usr/share/initramfs-tools/scripts/init-premount /etc/initramfs-tools/scripts")?;
    for (path, bytes) in FILES {
        switch.put(path, bytes, 0o755)?;
    }
    println!("{}", switch.command("/root/make-initramfs").timeout(LIMIT).run()?.check()?.stdout);
    let initramfs = files.path("initramfs");
    fs::write(&initramfs, switch.get(&format!("/boot/initrd.img-{}", machine.kernel()))?).unwrap();
    let argument = |name: &str| {
        let at = machine.arguments().iter().position(|argument| argument == name).unwrap();
        machine.arguments()[at + 1].clone()
    };
    let line = argument("-append");
    let words = line.split(' ').filter(|word| !word.starts_with("lab.") && *word != "quiet");
    let line = words.collect::<Vec<_>>().join(" ");
    let root = "net.ifnames=0 boot=lab ip=10.9.0.2:10.9.0.1::255.255.255.0:lab:eth0:none";
    Ok(Boot { kernel: argument("-kernel").into(), initramfs, command_line: format!("{line} {root}") })
}

/// Checks that every connection goes on.
fn goes_on(switch: &Machine, machine: &Machine) -> Result<()> {
    for work in ["talk", "hear"] {
        comes_further(machine, work, count(machine, work)? + 5)?;
    }
    nothing_wrong(switch)
}

/// Moves a machine there and back. The source's power is cut as soon as the destination has been
/// told to go on.
fn comes_back(place: Place) -> Result<()> {
    need_qemu()?;
    let files = Files::new(if place == Place::Firmware { "tombstones-firmware" } else { "tombstones-disk" });
    let switch = Switch::boot()?;
    let plugged = |number: u8| {
        let spec = switch.plugged(Kernel::BookwormCloud, 2, 768, number);
        place.with(spec, &files, &format!("disk{number}"))
    };
    let machine = switch.boot_moving(plugged(2))?;
    let destination = switch.boot_other(plugged(3))?;
    plug_in(&destination, "10.9.0.3")?;
    for (name, script, arguments) in [("clock", CLOCK, ""), ("talk", TALK, PEER), ("hear", HEAR, "")] {
        start(&machine, name, script, arguments)?;
    }
    switch.tell()?;
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;

    let key = receive(&destination, "10.9.0.3")?;
    let refused = machine.run(&format!("mercury migrate {key}"))?;
    println!("{}", refused.stderr);
    if place == Place::Firmware {
        assert!(refused.stderr.contains("nothing in the initial RAM disk checks"), "{}", refused.stderr);
    } else {
        assert!(refused.stderr.contains("no place for a tombstone"), "{}", refused.stderr);
        machine.sh("modprobe virtio_blk; mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt")?;
        println!("{}", machine.sh("mercury tombstone --prepare /mnt/mercury.tombstone; umount /mnt")?);
    }
    let debians = debians(&switch.peer, &machine, &files)?;

    let (id, boots) = (boot_id(&machine)?, destination.boots());
    let mut moving = machine.spawn(&format!("mercury migrate {key} --rounds 0"))?;
    if let Err(error) = wait_more(&destination, GOES_ON, 0) {
        println!("{:?} {:?}", moving.output_so_far(), moving.errors_so_far());
        return Err(error);
    }
    machine.power_cut()?;
    println!("{}", said(&machine));
    destination.wait_other(boots)?;
    is_well(&destination, &id)?;
    goes_on(&switch.peer, &destination)?;

    // The source is left alone for longer than its boot to the root takes.
    let console = machine.try_other(&debians, Duration::from_secs(90))?;
    println!("{console}");
    assert!(console.contains(STAYS) && console.contains("to 10.9.0.3"), "{console}");
    assert!(!console.contains(BEGINS), "{console}");
    let off = machine.try_other(&debians.with("mercury.tombstone=poweroff"), START)?;
    assert!(off.contains("this machine is powered off") && !off.contains(BEGINS), "{off}");
    is_well(&destination, &id)?;
    goes_on(&switch.peer, &destination)?;

    // The lab's own initial RAM disk checks no tombstone.
    let repaired = machine.start_as(plugged(2))?;
    plug_in(&repaired, "10.9.0.4")?;
    let boots = repaired.boots();
    let back = receive(&repaired, "10.9.0.4")?;
    let line = if place == Place::Firmware {
        format!("mercury migrate {back} --rounds 0")
    } else {
        migrate(&back, "--rounds 0")
    };
    let mut moving = destination.spawn(&line)?;
    let ended = destination.wait_shutdown(LIMIT);
    if ended.is_err() {
        println!("{:?} {:?} {}", moving.output_so_far(), moving.errors_so_far(), repaired.serial_log());
    }
    ended?;
    repaired.wait_other(boots)?;
    is_well(&repaired, &id)?;
    goes_on(&switch.peer, &repaired)?;
    // The mover reports the tombstone's removal when all applications run on.
    let mut tombstone = String::new();
    for _ in 0..50 {
        tombstone = repaired.sh("mercury tombstone")?;
        if tombstone.contains(": cleared") {
            break;
        }
        thread::sleep(Duration::from_millis(200));
    }
    println!("{tombstone}");
    assert!(tombstone.contains(": cleared") && !tombstone.contains("does not go on"), "{tombstone}");
    let shown: serde_json::Value = serde_json::from_str(&repaired.sh("mercury tombstone --json")?).unwrap();
    assert_eq!(shown["forbids"], false, "{shown}");
    repaired.check_next_attach()?;

    // The same system on the same hardware, which loses its power once more. This time it starts.
    let console = repaired.try_other(&debians, START)?;
    println!("{console}");
    assert!(console.contains(BEGINS) && !console.contains(STAYS), "{console}");
    Ok(())
}

/// Keeps a source from starting by a tombstone in a variable of the firmware.
#[test]
#[ignore = "long"]
fn a_source_with_uefi_that_lost_its_power_does_not_start() -> Result<()> {
    comes_back(Place::Firmware)
}

/// Keeps a source from starting by a tombstone on a disk of the machine's own.
#[test]
#[ignore = "long"]
fn a_source_with_a_bios_that_lost_its_power_does_not_start() -> Result<()> {
    comes_back(Place::Disk)
}
