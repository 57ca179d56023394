//! An image's core in Debian's debugger for kernels: crash, with the kernel's debug symbols.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use mercury_lab::{
    Bus, Disk, Kernel, Machine, Qemu, Result, Spec, apt::Packages, artefacts::build_program, paths,
};

const DISK: &str = "/dev/vda";
/// Debian 12's crash is older than the kernel's point releases, and does not find their tasks.
const CRASH: Packages = Packages { release: "trixie", backports: false, names: "crash" };

/// Returns packages in a folder of their own, fetched once.
fn fetched(name: &str, packages: Packages) -> Result<PathBuf> {
    let tree = paths::lab_dir("tools")?.join(name);
    if !tree.exists() {
        let unfinished = tree.with_extension("new");
        let _ = fs::remove_dir_all(&unfinished);
        packages.extract(name, name, &unfinished)?;
        fs::rename(&unfinished, &tree).unwrap();
    }
    Ok(tree)
}

/// Returns the output of a command of crash.
fn crash(tree: &Path, symbols: &Path, core: &Path, command: &str) -> String {
    let (libraries, commands) = (tree.join("usr/lib/x86_64-linux-gnu"), core.with_extension("commands"));
    fs::write(&commands, format!("{command}\nquit\n")).unwrap();
    let mut crash = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    crash.arg("--library-path").arg(&libraries).arg(tree.join("usr/bin/crash")).arg("-s").arg("-i");
    let output = crash.arg(commands).arg(symbols).arg(core).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns crash with a core, as a function from a command to its output.
fn debugger(release: &str, core: &Path) -> Result<impl Fn(&str) -> String> {
    let names: &'static str = format!("linux-image-{release}-dbg").leak();
    let symbols = fetched(names, Packages { release: "bookworm", backports: false, names })?;
    let symbols = symbols.join("usr/lib/debug/boot").join(format!("vmlinux-{release}"));
    let (tree, core) = (fetched("crash", CRASH)?, core.to_owned());
    Ok(move |command: &str| {
        let said = crash(&tree, &symbols, &core, command);
        println!("crash> {command}\n{}", said.lines().take(40).collect::<Vec<_>>().join("\n"));
        said
    })
}

/// A script with two lives: the first one panics, and the second one writes the first one's memory to a disk.
const LIVES: &str = r#"
sleep 1
mercury snapshot --json > /run/said 2>&1
if grep -q '"kept"' /run/said; then
    sleep 5432 &
    echo of the first life > /dev/kmsg
    sleep 1
    echo c > /proc/sysrq-trigger
fi
mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && mercury postmortem --core /mnt/core > /run/report 2>&1 &&
    dd if=/mnt/core of=/dev/vdb bs=1M conv=sparse,fsync && umount /mnt
echo "<3>lives: $? $(tail -1 /run/report)" > /dev/kmsg
"#;

/// Has crash read the life that ended, from a core that the next life wrote.
#[test]
#[ignore = "fetches 290 MB of debug symbols and unpacks 1.7 GB"]
fn crash_opens_a_dead_life() -> Result<()> {
    let spec = Spec::new(Kernel::BookwormCloud).qemu_version(Qemu::Newer).memory_mib(1024);
    let machine = Machine::boot(spec.disk(Bus::Virtio, 1536).disk(Bus::Virtio, 1536))?;
    let release = machine.sh("uname -r")?;
    machine.put("/run/lives", LIVES.as_bytes(), 0o755)?;
    machine.sh("sync; mount -o remount,ro /; mercury load")?;
    machine.sh("setsid bash /run/lives > /run/lives.said 2>&1 < /dev/null &")?;
    let line = machine.wait_serial("lives: .*\n", Duration::from_secs(300))?;
    assert!(line.contains("lives: 0"), "{line} {}", machine.sh("cat /run/report /run/lives.said")?);
    println!("{}", machine.sh("cat /run/report")?);
    machine.sh("mercury detach; sync")?;

    let folder = std::env::temp_dir().join(format!("mercury-dead-{}", machine.pid()));
    fs::create_dir_all(&folder).unwrap();
    let core = folder.join("core");
    machine.keep_disks()?.save(Disk::Extra(1), &core)?;
    let said = debugger(&release, &core)?;
    let tasks = said("ps");
    assert!(tasks.lines().filter(|line| line.ends_with("sleep")).count() >= 1, "{tasks}");
    let log = said("log");
    assert!(log.contains("of the first life") && log.contains("sysrq: Trigger a crash"), "{log}");
    let trace = said("bt -a");
    assert!(trace.contains("sysrq_handle_crash") && trace.contains("panic at "), "{trace}");
    fs::remove_dir_all(folder).unwrap();
    Ok(())
}

#[test]
#[ignore = "fetches 290 MB of debug symbols and unpacks 1.7 GB"]
fn crash_opens_a_core() -> Result<()> {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    let spec = Spec::new(Kernel::BookwormCloud).qemu_version(Qemu::Newer).disk(Bus::Virtio, 1024);
    let machine = Machine::boot(spec)?;
    machine.sh("setsid sleep 12345 > /dev/null 2>&1 < /dev/null & echo this is the machine > /dev/kmsg")?;
    let (release, pid) = (machine.sh("uname -r")?, machine.sh("sleep 1; pgrep -f '^sleep 12345'")?);
    machine.sh("modprobe -r kvm_amd 2> /dev/null || true")?;
    let _checkpoint = machine.spawn(&format!("mercury checkpoint --poweroff {DISK}"))?;
    machine.wait_shutdown(Duration::from_secs(180))?;

    let folder = std::env::temp_dir().join(format!("mercury-core-{}", machine.pid()));
    fs::create_dir_all(&folder).unwrap();
    let (image, core) = (folder.join("image"), folder.join("core"));
    machine.keep_disks()?.save(Disk::Extra(0), &image)?;
    let mut inspect = Command::new(build_program("mercury-cli", "mercury")?);
    assert!(inspect.arg("inspect").arg("--core").arg(&core).arg(&image).status().unwrap().success());

    let said = debugger(&release, &core)?;
    let tasks = said("ps");
    assert!(
        tasks.lines().any(|line| line.contains(&format!(" {pid} ")) && line.ends_with("sleep")),
        "{tasks}"
    );
    assert!(tasks.contains("[kthreadd]") && tasks.lines().count() > 30, "{tasks}");
    let trace = said(&format!("bt {pid}"));
    assert!(trace.contains("schedule at ") && trace.contains("entry_SYSCALL_64_after_hwframe"), "{trace}");
    let log = said("log");
    assert!(log.contains("Linux version 6.1") && log.contains("this is the machine"), "{log}");
    fs::remove_dir_all(folder).unwrap();
    Ok(())
}
