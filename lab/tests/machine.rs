//! The lab itself: machines boot, obey, fail visibly, and leave nothing behind.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mercury_lab::{
    Bus, Error, Exit, Icount, Init, Kernel, Machine, MachineCheck, Nic, Reservation, Reset, Result, Spec,
};

const MINUTE: Duration = Duration::from_secs(60);

fn plain() -> Spec {
    Spec::new(Kernel::BookwormCloud)
}

fn boots(kernel: Kernel) -> Result<()> {
    let machine = Machine::boot(Spec::new(kernel))?;
    let release = machine.sh("uname -r")?;
    assert_eq!(release, machine.kernel());
    assert_eq!(release.contains("cloud"), kernel.name().contains("cloud"));
    assert_eq!(machine.sh("nproc")?, "2");
    assert_eq!(machine.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource")?, "tsc");
    assert!(machine.sh("grep -wm1 flags /proc/cpuinfo")?.contains(" svm "));
    // The machine has the compiler, and the headers of its own kernel.
    machine.sh("test -e /lib/modules/$(uname -r)/build/Makefile && gcc --version")?;
    machine.shut_down()
}

#[test]
fn bookworm_cloud_boots() -> Result<()> {
    boots(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn bookworm_generic_boots() -> Result<()> {
    boots(Kernel::BookwormGeneric)
}

#[test]
#[ignore = "long"]
fn trixie_cloud_boots() -> Result<()> {
    boots(Kernel::TrixieCloud)
}

#[test]
#[ignore = "long"]
fn trixie_generic_boots() -> Result<()> {
    boots(Kernel::TrixieGeneric)
}

#[test]
fn the_agent_runs_commands_and_moves_files() -> Result<()> {
    let machine = Machine::boot(plain().cpus(1))?;
    commands_end_as_they_end(&machine)?;
    output_is_whole_and_apart(&machine)?;
    files_come_and_go(&machine)?;
    jobs_run_beside(&machine)?;
    what_fails_shows_the_scene(&machine)
}

fn commands_end_as_they_end(machine: &Machine) -> Result<()> {
    assert_eq!(machine.run("exit 42")?.code(), Some(42));
    assert_eq!(machine.run("kill -SEGV $$")?.exit, Exit::Signal(11));
    assert!(machine.run("true")?.success());
    let slow = machine.command("sleep 100").guest_timeout(Duration::from_millis(300)).run()?;
    assert_eq!(slow.exit, Exit::TimedOut);
    let command = machine.command("echo $GREETING; pwd; cat").env("GREETING", "hi").cwd("/etc");
    assert_eq!(command.stdin("from the host").run()?.stdout, "hi\n/etc\nfrom the host");
    // A daemon that keeps the pipes open does not delay the command's end.
    let start = Instant::now();
    assert_eq!(machine.run("sleep 50 & echo started")?.stdout, "started\n");
    assert!(start.elapsed() < Duration::from_secs(40));
    let missing = machine.program(&["/no/such/program"]).run();
    assert!(
        matches!(&missing, Err(Error::Scene { source, .. }) if source.to_string().contains("No such file"))
    );
    machine.forgive();
    Ok(())
}

fn output_is_whole_and_apart(machine: &Machine) -> Result<()> {
    let output = machine.run("seq 1 100000; echo oops >&2")?;
    let expected: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(output.stdout, expected);
    assert_eq!(output.stderr, "oops\n");
    let mut pieces = 0;
    machine.command("for i in 1 2 3; do echo $i; sleep 0.3; done").run_streaming(|_, _| pieces += 1)?;
    assert!(pieces >= 3, "the output came in {pieces} pieces");
    Ok(())
}

fn files_come_and_go(machine: &Machine) -> Result<()> {
    let bytes: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    machine.put("/tmp/numbers", &bytes, 0o640)?;
    assert_eq!(machine.sh("stat -c '%s %a' /tmp/numbers")?, "1200000 640");
    assert!(machine.get("/tmp/numbers")? == bytes);
    machine.put("/tmp/numbers", b"", 0o640)?;
    assert!(machine.get("/tmp/numbers")?.is_empty());
    assert!(machine.get("/proc/version")?.starts_with(b"Linux version"));
    let error = machine.get("/no/such/file").unwrap_err().to_string();
    assert!(error.contains("read /no/such/file"), "{error}");
    machine.forgive();
    Ok(())
}

fn jobs_run_beside(machine: &Machine) -> Result<()> {
    let mut echo = machine.spawn("while read line; do echo got $line; done; echo end")?;
    echo.write_stdin(b"one\n")?;
    echo.wait_output("got one", MINUTE)?;
    assert!(!echo.has_ended()?);
    assert_eq!(machine.sh(&format!("cat /proc/{}/comm", echo.pid()))?, "bash");
    echo.close_stdin()?;
    assert!(echo.wait(MINUTE)?.stdout.ends_with("end\n"));

    let sleeper = machine.spawn("sleep 1000")?;
    sleeper.kill(15)?;
    assert_eq!(sleeper.wait(MINUTE)?.exit, Exit::Signal(15));
    Ok(())
}

fn what_fails_shows_the_scene(machine: &Machine) -> Result<()> {
    machine.sh("echo a word on the console > /dev/ttyS0")?;
    assert_eq!(machine.wait_serial("w.rd on", MINUTE)?, "word on");
    let error = machine.sh("echo all is lost >&2; exit 9").unwrap_err().to_string();
    for part in ["ended with code 9", "all is lost", "bookworm-cloud, 1 CPUs", "a word on the console"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    let late = machine.command("sleep 77").timeout(Duration::from_millis(300)).run();
    let late = late.unwrap_err().to_string();
    assert!(late.contains("sleep 77") && late.contains("RIP="), "{late}");
    // The lab examines a machine that does not answer from outside.
    machine.sh("echo a word in the log > /dev/kmsg")?;
    let silent = machine.wait_shutdown(Duration::from_millis(300)).unwrap_err().to_string();
    assert!(silent.contains("RIP=") && silent.contains("a word in the log"), "{silent}");
    machine.forgive();
    Ok(())
}

#[test]
fn a_panic_ends_the_machine_and_is_seen() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let error = machine.run("echo c > /proc/sysrq-trigger; sleep 100").unwrap_err().to_string();
    assert!(error.contains("the machine has gone"), "{error}");
    machine.wait_shutdown(MINUTE)?;
    machine.wait_serial("Kernel panic - not syncing: sysrq triggered crash", MINUTE)?;
    machine.forgive();
    Ok(())
}

#[test]
fn nmis_arrive() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let count = "awk '/NMI:/ {print $2}' /proc/interrupts";
    let before: u64 = machine.sh(count)?.parse().unwrap();
    machine.qmp()?.inject_nmi()?;
    machine.sh(&format!("until [ $({count}) -gt {before} ]; do sleep 0.1; done"))?;
    Ok(())
}

#[test]
fn machine_checks_arrive() -> Result<()> {
    let machine = Machine::boot(Spec::new(Kernel::BookwormGeneric))?;
    // A corrected error of bank 5: valid, enabled, address valid.
    let check = MachineCheck {
        cpu: 1,
        bank: 5,
        status: 0x9400_0000_0000_0001,
        address: 0x1000,
        ..Default::default()
    };
    machine.qmp()?.inject_mce(&check)?;
    // Only the kernel's poll reports a corrected error, every five minutes or on request.
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    machine.sh("until dmesg | grep -q 'Machine check events logged'; do sleep 0.2; done")?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn processors_come_and_go() -> Result<()> {
    let machine = Machine::boot(plain().cpus(2).max_cpus(4))?;
    machine.qmp()?.cpu_add()?;
    let cpu = machine.qmp()?.cpu_add()?;
    assert!(machine.qmp()?.cpu_add().is_err());
    machine.sh("until [ -e /sys/devices/system/cpu/cpu3/online ]; do sleep 0.1; done")?;
    machine.sh("for cpu in 2 3; do echo 1 > /sys/devices/system/cpu/cpu$cpu/online; done")?;
    assert_eq!(machine.sh("nproc")?, "4");
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu3/online")?;
    machine.qmp()?.cpu_del(&cpu, MINUTE)?;
    assert_eq!(machine.sh("nproc")?, "3");
    Ok(())
}

#[test]
#[ignore = "long"]
fn processors_are_as_described() -> Result<()> {
    let flags = |machine: &Machine| machine.sh("grep -wm1 flags /proc/cpuinfo");
    let machine = Machine::boot(plain().cpu("EPYC,-svm").cpu_feature("-pdpe1gb").phys_bits(46))?;
    assert!(!flags(&machine)?.contains("svm") && !flags(&machine)?.contains("pdpe1gb"));
    machine.sh("grep 'address sizes.*46 bits physical' /proc/cpuinfo")?;
    drop(machine);
    let machine = Machine::boot(plain().cpu_feature("+la57"))?;
    assert!(flags(&machine)?.contains("la57"));
    Ok(())
}

#[test]
#[ignore = "long"]
fn one_processor_counts_instructions() -> Result<()> {
    let machine = Machine::boot(plain().cpus(1).icount(Icount::NoSleep { shift: 3 }))?;
    assert_eq!(machine.sh("echo $((6 * 7))")?, "42");
    drop(machine);
    let machine = Machine::boot(plain().cpus(1).icount(Icount::Exact))?;
    assert_eq!(machine.sh("echo $((6 * 7))")?, "42");
    Ok(())
}

#[test]
fn a_power_cut_leaves_the_disk_and_no_qemu() -> Result<()> {
    let machine = Machine::boot(plain())?;
    machine.sh("echo written > /root/before; sync; sysctl -qw vm.dirty_writeback_centisecs=0")?;
    machine.sh("echo lost > /root/not-synced")?;
    let pid = machine.pid();
    machine.power_cut()?;
    assert!(!runs(pid));
    let machine = machine.start_again()?;
    assert_eq!(machine.sh("cat /root/before")?, "written");
    assert!(!machine.run("grep lost /root/not-synced")?.success());
    let pid = machine.pid();
    drop(machine);
    assert!(!runs(pid));
    Ok(())
}

fn runs(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !state.is_empty() && !state.contains(") Z ")
}

#[test]
#[ignore = "long"]
fn machines_restart() -> Result<()> {
    let machine = Machine::boot(plain().reset(Reset::Restarts))?;
    let boot_id = machine.sh("cat /proc/sys/kernel/random/boot_id")?;
    let boots = machine.boots();
    let mut job = machine.spawn("sleep 1000")?;
    machine.qmp()?.system_reset()?;
    machine.wait_reboot(boots)?;
    assert_ne!(machine.sh("cat /proc/sys/kernel/random/boot_id")?, boot_id);
    assert!(job.has_ended().unwrap_err().to_string().contains("gone"));
    machine.forgive();
    let boots = machine.boots();
    machine.spawn("reboot")?;
    machine.wait_reboot(boots)?;
    assert_eq!(machine.sh("echo again")?, "again");
    Ok(())
}

#[test]
#[ignore = "long"]
fn kexec_starts_another_kernel() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let boots = machine.boots();
    machine.sh("kexec -l /boot/vmlinuz-$(uname -r) --initrd=/mercury/initramfs/$(uname -r).cpio \
         --reuse-cmdline --append=lab.kexeced=1")?;
    machine.spawn("kexec -e")?;
    machine.wait_reboot(boots)?;
    machine.sh("grep -q lab.kexeced /proc/cmdline")?;
    Ok(())
}

#[test]
#[ignore = "long"]
fn a_saved_machine_comes_back() -> Result<()> {
    let machine = Machine::boot(plain().root_bus(Bus::Virtio))?;
    let job = machine.spawn("sleep 3; echo slept")?;
    machine.sh("echo then > /tmp/state")?;
    machine.qmp()?.savevm("point")?;
    machine.sh("echo now > /tmp/state")?;
    machine.qmp()?.loadvm("point")?;
    assert_eq!(machine.sh("cat /tmp/state")?, "then");
    assert_eq!(job.wait(MINUTE)?.stdout, "slept\n");
    assert!(machine.qmp()?.loadvm("nothing").is_err());
    Ok(())
}

#[test]
#[ignore = "long"]
fn disks_cards_and_gdb() -> Result<()> {
    let spec = Spec::new(Kernel::BookwormGeneric).root_bus(Bus::Ahci).nic(Nic::E1000e);
    let machine = Machine::boot(spec.disk(Bus::Nvme, 64).disk(Bus::Virtio, 32).gdb())?;
    assert_eq!(machine.sh("lsblk -dbno SIZE /dev/nvme0n1")?.trim(), "67108864");
    assert_eq!(machine.sh("findmnt -no SOURCE /")?, "/dev/sda");
    machine.sh("until ip -br address | grep 10.0.2.15; do sleep 0.2; done")?;
    let mut gdb = TcpStream::connect(("127.0.0.1", machine.gdb_port().unwrap())).unwrap();
    gdb.write_all(b"$?#3f").unwrap();
    let mut answer = [0; 3];
    gdb.read_exact(&mut answer).unwrap();
    assert!(answer.starts_with(b"+$T") || answer.starts_with(b"$T0"), "{answer:?}");
    Ok(())
}

#[test]
#[ignore = "long"]
fn postgres_answers() -> Result<()> {
    let machine = Machine::boot(plain().memory_mib(1536))?;
    machine.start_postgres()?;
    let report = machine.sh("pgbench -n -S -t 50 bench")?;
    assert!(report.contains("number of transactions actually processed: 50/50"), "{report}");
    machine.shut_down()
}

#[test]
#[ignore = "long"]
fn systemd_runs_the_machine() -> Result<()> {
    let machine = Machine::boot(plain().init(Init::Systemd))?;
    assert_eq!(machine.sh("cat /proc/1/comm")?, "systemd");
    let state = machine.command("systemctl is-system-running --wait").timeout(4 * MINUTE).run()?;
    assert_eq!(state.stdout, "running\n", "{}", machine.sh("systemctl --failed; systemctl list-jobs")?);
    assert_eq!(machine.sh("command -v mercury-lab-agent")?, "/mercury/bin/mercury-lab-agent");
    machine.shut_down()
}

#[test]
#[ignore = "long"]
fn a_reservation_holds_several_machines() -> Result<()> {
    // Two machines with one processor are as heavy as one with two. A test that waits for all slots
    // keeps some idle.
    let reservation = Reservation::of(1, &[Kernel::BookwormCloud])?;
    let first = Machine::boot_reserved(plain().cpus(1), &reservation)?;
    let second = Machine::boot_reserved(plain().cpus(1), &reservation)?;
    assert_ne!(
        first.sh("cat /proc/sys/kernel/random/boot_id")?,
        second.sh("cat /proc/sys/kernel/random/boot_id")?
    );
    Ok(())
}

#[test]
fn evidence_is_kept_only_when_something_failed() -> Result<()> {
    let directory =
        |machine: &Machine| -> PathBuf { fs::read_link(format!("/proc/{}/cwd", machine.pid())).unwrap() };
    let machine = Machine::boot(plain().cpus(1))?;
    let clean = directory(&machine);
    drop(machine);
    assert!(!clean.exists());
    let machine = Machine::boot(plain().cpus(1))?;
    let failed = directory(&machine);
    let error = machine.sh("false").unwrap_err().to_string();
    drop(machine);
    assert!(error.contains(failed.file_name().unwrap().to_str().unwrap()));
    assert!(has_evidence(&failed));
    fs::remove_dir_all(failed).unwrap();
    Ok(())
}

fn has_evidence(directory: &Path) -> bool {
    directory.join("serial.log").exists() && directory.join("command").exists()
}

#[test]
fn a_machine_that_cannot_boot_says_why() {
    let error =
        Machine::boot(plain().kernel_arg("rdinit=/nothing").kernel_arg("root=/dev/none")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("Kernel panic"), "{text}");
    let kept = text.lines().find_map(|line| line.trim().strip_prefix("kept in: ")).unwrap();
    fs::remove_dir_all(kept).unwrap();
}

/// Lets all processors of a machine hang, beside a task that waits in the kernel. The report from
/// outside names where they stand, in the kernel and in a module, and has the log to its end.
fn hangs(kernel: Kernel) -> Result<()> {
    const WAITS: &str = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(1000)";
    let machine = Machine::boot(Spec::new(kernel))?;
    machine.sh("insmod /mercury/lib/modules/$(uname -r)/mercury_test.ko")?;
    let _waiting = machine.spawn(&format!("exec python3 -c '{WAITS}'"))?;
    machine.sh("until grep -q kernel_clone /proc/$(pgrep -o python3)/stack; do sleep 0.1; done")?;
    let _hanging = machine.spawn("echo hang-all 100 > /dev/mercury_test")?;
    machine.wait_serial("all CPUs hang", MINUTE)?;
    let error = machine.wait_shutdown(Duration::from_secs(1)).unwrap_err();
    machine.forgive();
    let text = error.to_string();
    println!("{text}");
    let has =
        |pattern: &str| assert!(regex::Regex::new(pattern).unwrap().is_match(&text), "{pattern}: {text}");
    has(r"(?s)CPU#0 RIP=.*runs in .*CPU#1 RIP=.*a while later.*CPU#0 RIP=.*runs in .*CPU#1 RIP=");
    // The compiler may have put the loop into its caller, and the caller's unlikely part elsewhere.
    let writer = r"test_write\+0x[0-9a-f]+ \[mercury_test\] < .*vfs_write\+";
    has(&format!(r"runs in (hang|test_hang_all(\.cold)?)\+0x[0-9a-f]+ \[mercury_test\] < .*{writer}"));
    has(r"runs in hang\+0x[0-9a-f]+ \[mercury_test\] < .*smp_call_function");
    has(r"python3 [0-9]+ waits, state 0x[0-9a-f]+, has slept [0-9]+ times: .*kernel_clone\+");
    has(r"\[ *[0-9]+\.[0-9]{6}\] mercury_test: all CPUs hang\n");
    has(r"LVTT|pin [0-9]+ ");
    Ok(())
}

#[test]
fn a_machine_that_hangs_is_examined() -> Result<()> {
    hangs(Kernel::BookwormCloud)
}

#[test]
#[ignore = "long"]
fn a_machine_with_linux_6_12_that_hangs_is_examined() -> Result<()> {
    hangs(Kernel::TrixieGeneric)
}
