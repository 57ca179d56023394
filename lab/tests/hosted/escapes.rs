//! Ways out of a machine, tried from its inside, and the host's resources that its processes have.

use super::*;

/// System calls of x86-64 that begin a way out. The host ends the machine at the first one.
const WAYS_OUT: &[(&str, i64)] = &[
    ("open", 2),
    ("openat", 257),
    ("socket", 41),
    ("connect", 42),
    ("ptrace", 101),
    ("process_vm_writev", 311),
    ("mount", 165),
    ("unshare", 272),
    ("execve", 59),
    ("clone", 56),
    ("io_uring_setup", 425),
];

/// Returns a program whose system calls reach the host's kernel, as another number of its process
/// shows. The program then reports that by the host's own `write`, and makes a call that the
/// monitor does not need.
fn escape(number: i64) -> String {
    let selector = mercury_hosted::block::at::SELECTOR;
    format!(
        "python3 -c 'import ctypes; call = ctypes.CDLL(None).syscall; own = call(39)\n\
         while call(39) == own: ctypes.memset({selector}, 0, 1)\n\
         call(1, 1, b\"at the \" + b\"host\\n\", 12)\n\
         call({number}, ctypes.c_long(-1), 0, 0, 0, 0, 0)'"
    )
}

/// Ends a program without isolation that has become the monitor, at its first attempt to go
/// further.
#[test]
#[ignore = "long"]
fn a_program_that_has_become_the_monitor_opens_connects_traces_and_mounts_nothing() -> Result<()> {
    let place = Place::new("ways-out")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    let disk = PathBuf::from(format!("{},ro", disk.display()));
    for (name, number) in WAYS_OUT {
        let mut machine = shell_on_disk(&place, &disk, &["--no-rewrite"]);
        machine.type_line(&escape(*number));
        let start = Instant::now();
        let status = loop {
            if let Some(status) = machine.child.try_wait().expect("its state") {
                break status;
            }
            assert!(start.elapsed() < patient(LIMIT), "{name}: it still runs\n{}", machine.said());
            thread::sleep(Duration::from_millis(50));
        };
        assert_eq!(status.code(), BROKEN, "{name}: {}", machine.said());
        assert!(machine.said().contains(FORBIDDEN), "{name}: {}", machine.said());
        assert!(machine.said().contains("at the host\n"), "{name}: {}", machine.said());
    }
    Ok(())
}

/// Returns a field of a process's `status`.
fn field(process: i32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).trim().to_owned()
}

/// Returns the open files of a process.
fn open(process: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{process}/fd")).expect("what it has open").flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.display().to_string()).collect()
}

/// Gives every process of a machine a filter of system calls, and no rights by what it starts.
/// Monitors have open only the given files, and programs' processes only the guest's memory.
#[test]
#[ignore = "long"]
fn every_process_of_a_machine_is_confined() -> Result<()> {
    const FILTERED: &str = "2";
    let place = Place::new("confined")?;
    let disk = place.root_disk(&Image::ensure(Release::Bookworm)?)?;
    for (isolation, cpus) in [(ISOLATIONS[0], "2"), (ISOLATIONS[1], "2"), (ISOLATIONS[0], "1")] {
        let mut machine = shell_on_disk(&place, &disk, &["--cpus", cpus, "--net", "passt", isolation]);
        let (mut monitors, mut programs, mut spaces) = (0, 0, 0);
        for process in processes_of(&place.runtime()) {
            let name = field(process, "Name");
            assert_eq!(field(process, "NoNewPrivs"), "1", "{name}");
            assert_eq!(field(process, "Seccomp"), FILTERED, "{name}");
            assert_eq!(field(process, "CapEff").trim_start_matches('0'), "", "{name}");
            let (kinds, own) = match name.as_str() {
                "mercury-program" => (&["/memfd:"][..], &[][..]),
                // The process's standard input is a pipe.
                "mercury-space" => (&["/memfd:", "pipe:"][..], &[machine.log.display().to_string()][..]),
                _ => (
                    &["/memfd:", "anon_inode:", "socket:", "pipe:"][..],
                    &[disk.display().to_string(), machine.log.display().to_string()][..],
                ),
            };
            *(match name.as_str() {
                "mercury-program" => &mut programs,
                "mercury-space" => &mut spaces,
                _ => &mut monitors,
            }) += 1;
            let is_expected =
                |file: &String| kinds.iter().any(|kind| file.starts_with(kind)) || own.contains(file);
            let unexpected: Vec<String> =
                open(process).into_iter().filter(|file| !is_expected(file)).collect();
            assert!(unexpected.is_empty(), "{name} has open {unexpected:?}");
        }
        // Those for address spaces come as they are needed, from a process of their own.
        assert_eq!(monitors, 2, "{isolation}");
        assert_eq!(programs, if isolation == ISOLATIONS[1] { 96 } else { 0 }, "{isolation}");
        assert!(if cpus == "1" { (2..=31).contains(&spaces) } else { spaces == 0 }, "{spaces} processes");
        machine.type_line("poweroff -f");
        assert_well(&machine.end(HALTED));
    }
    Ok(())
}
