//! The machine of `make hosted`, used by a person at its terminal.

use std::os::unix::fs::MetadataExt;

use mercury_lab::paths;

use super::*;

/// The key that ends the foreground job, if the terminal has job control.
const CTRL_C: &str = "\u{3}";
const PROGRAM: &str = "int main(void) { return 42; }";
/// The same in lines, for a debugger that goes from one to the next.
const LINES: &str = r"int main(void)\n{\n\tint a = 20;\n\ta += 1;\n\treturn 2 * a;\n}\n";

/// Returns the address of the machine's network card, if this host gives it one.
fn expected_address() -> Option<String> {
    let output = Command::new("ip").args(["-4", "route", "show", "default"]).output().ok()?;
    let has_route = !output.stdout.is_empty() && host::find_program("passt").is_some();
    has_route.then(|| addresses().0)
}

#[test]
#[ignore = "long"]
fn a_person_at_the_terminal_has_jobs_a_network_a_compiler_and_a_clean_end() -> Result<()> {
    let place = Place::new("person")?;
    let lab = artefacts::build_program("mercury-lab-bench", "lab")?;
    let line = format!("stty rows 41 columns 101; exec {} hosted", lab.display());
    let mut command = Command::new("script");
    let mut machine = Machine::start(
        &place,
        command
            .args(["-qec", &line, "/dev/null"])
            .env("TERM", "xterm-256color")
            .current_dir(&place.directory),
    );
    machine.wait_within(4 * LIMIT, "in an ordinary process");
    machine.type_line("stty -echo; PS1=; stty size; echo $TERM $(tty) re''ady");
    machine.wait_for("41 101\n");
    machine.wait_for("xterm-256color /dev/ttyS0 ready\n");
    machine.type_line("sh -c 'echo sta''rted; exec sleep 1000'");
    machine.wait_for("started\n");
    machine.type_line(CTRL_C);
    machine.type_line("echo st''atus $?");
    machine.wait_for("status 130\n");
    machine.type_line("sleep 1000 & kill %1; wait %1; echo jo''b $?");
    machine.wait_for("job 143\n");
    machine.type_line("test -e /proc/self/status -a -d /sys/class/net && script -qc tty /dev/null;");
    machine.wait_for("/dev/pts/0\n");
    machine.type_line(&format!("cd /run; echo '{PROGRAM}' > a.c; gcc a.c -o a; ./a; echo com''piled $?"));
    machine.wait_for("compiled 42\n");
    // A breakpoint, a step of one instruction, one of a line, and an end of its own.
    let steps = "-ex 'break main' -ex run -ex stepi -ex next -ex next -ex 'print a' -ex continue";
    machine.type_line(&format!("printf '{LINES}' > g.c; gcc -g g.c -o g"));
    machine.type_line(&format!("gdb -nx -batch {steps} ./g; echo deb''ugged"));
    machine.wait_for("debugged\n");
    let said = machine.said();
    for part in ["Breakpoint 1, main", "$1 = 21", "exited with code 052"] {
        assert!(said.contains(part), "no `{part}`: {said}");
    }
    // Such a program cannot have its addresses. It ends with its own message, and the machine goes on.
    machine.type_line("gcc -fsanitize=address a.c -o b; ./b; echo sani''tized $?; echo still $((40 + 2))");
    machine.wait_for("sanitized ");
    machine.wait_for("still 42\n");
    let said = machine.said();
    assert!(said.contains("AddressSanitizer") && !said.contains("sanitized 42"), "{said}");
    if let Some(address) = expected_address() {
        machine.type_line("ip -4 -o address show dev eth0; cat /etc/resolv.conf; echo net''work");
        machine.wait_for("network\n");
        assert!(machine.said().contains(&address), "no {address}: {}", machine.said());
    }
    machine.type_line("exit");
    let log = machine.end(HALTED);
    assert!(!log.contains("panic") && !log.contains("hosted: "), "{log}");
    for disk in fs::read_dir(paths::lab_dir("hosted")?).expect("the disks").flatten() {
        let mode = disk.metadata().expect("its rights").mode();
        assert!(disk.path().extension().is_some() || mode & 0o077 == 0, "{disk:?}: {mode:o}");
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("the mounts");
    let target = paths::root().join("target/");
    assert!(!mounts.contains(&*target.to_string_lossy()), "{mounts}");
    Ok(())
}
