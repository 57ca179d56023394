//! Panics after the commit. From the commit on the destination may run this machine, which stands
//! still here. A panic would unwind, and so let the machine go on. It must end the process instead,
//! with which nothing goes on.

use std::{fs::File, io::Write, panic};

/// Makes a panic end this process at once, and reports it at the console, because all other readers
/// stand still.
pub fn begin(console: Option<File>) {
    panic::set_hook(Box::new(move |panic| {
        if let Some(mut console) = console.as_ref() {
            let _ = write!(
                console,
                "\r\nmercury migrate: {panic}\r\nThis process ends here. Its undo process asks on if the \
                 machine runs at the destination\r\n"
            );
        }
        std::process::abort();
    }));
}

/// Ends this, after the destination has promised that it never runs the machine, or an operator
/// has.
pub fn end() {
    drop(panic::take_hook());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::process::ExitStatusExt, process::Command};

    const NAME: &str = "migrate::no_way_back::tests::a_panic_undoes_nothing";
    const WHEN: &str = "MERCURY_TEST_PANICS";

    struct Held;

    impl Drop for Held {
        fn drop(&mut self) {
            println!("released");
        }
    }

    /// Holds a value, panics, and so ends this process.
    fn panic_as(when: &str) {
        begin(None);
        if when == "after the end" {
            end();
        }
        let _held = Held;
        panic!("no thread can be made");
    }

    #[test]
    fn a_panic_undoes_nothing() {
        if let Some(when) = std::env::var_os(WHEN) {
            return panic_as(&when.to_string_lossy());
        }
        let run = |when| {
            let mut this = Command::new(std::env::current_exe().expect("this program"));
            this.args(["--exact", NAME, "--nocapture"]).env(WHEN, when);
            let output = this.output().expect("it runs");
            (output.status.signal(), String::from_utf8_lossy(&output.stdout).contains("released"))
        };
        assert_eq!(run("before the end"), (Some(libc::SIGABRT), false));
        assert_eq!(run("after the end"), (None, true), "otherwise the test says nothing");
    }
}
