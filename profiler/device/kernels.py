"""The two kernels that the profiler runs on the device, as PTX for every GPU since Maxwell. The stamp stores the
device's time. The other one answers the host (see ping_pong.py).

`%globaltimer` counts nanoseconds. It is the same on all multiprocessors of a device.
"""

from __future__ import annotations

STAMP, PONG, NOTHING = "cbtop_stamp", "cbtop_pong", "cbtop_nothing"

# Indices of the memory words through which host and device exchange times: the host's request, the timer's resolution
# (0 until the kernel has begun), and a flag that is 1 after the kernel has ended. The answers follow from FIRST_PONG
# on.
PING, RESOLUTION, ENDED, FIRST_PONG = 0, 1, 2, 3

PTX = b"""
.version 6.0
.target sm_50
.address_size 64

// One thread: the time, into the word at `slot`.
.visible .entry cbtop_stamp(.param .u64 slot)
{
    .reg .u64 %at, %time;
    ld.param.u64 %at, [slot];
    cvta.to.global.u64 %at, %at;
    mov.u64 %time, %globaltimer;
    st.volatile.global.u64 [%at], %time;
    ret;
}

// What a stamp is measured against.
.visible .entry cbtop_nothing()
{
    ret;
}

// One thread: each time that the host has raised words[0] by one, the time, into the next word from words[3] on.
// It ends after `rounds` of them, after `limit_ns`, or where the timer stands still.
.visible .entry cbtop_pong(.param .u64 words, .param .u64 rounds, .param .u64 limit_ns)
{
    .reg .pred %ends, %again;
    .reg .u64 %at, %pong, %rounds, %deadline, %round, %asked, %now, %before, %looks;
    ld.param.u64 %at, [words];
    cvta.to.global.u64 %at, %at;
    ld.param.u64 %rounds, [rounds];
    ld.param.u64 %deadline, [limit_ns];
    mov.u64 %now, %globaltimer;
    add.u64 %deadline, %deadline, %now;

    mov.u64 %looks, 0;
FIRST_TICK:
    mov.u64 %before, %globaltimer;
    add.u64 %looks, %looks, 1;
    setp.gt.u64 %ends, %looks, 1000000;
    @%ends bra END;
    setp.eq.u64 %again, %before, %now;
    @%again bra FIRST_TICK;
SECOND_TICK:
    mov.u64 %now, %globaltimer;
    add.u64 %looks, %looks, 1;
    setp.gt.u64 %ends, %looks, 1000000;
    @%ends bra END;
    setp.eq.u64 %again, %before, %now;
    @%again bra SECOND_TICK;
    sub.u64 %now, %now, %before;
    st.volatile.global.u64 [%at+8], %now;

    add.u64 %pong, %at, 24;
    mov.u64 %round, 1;
NEXT:
    setp.gt.u64 %ends, %round, %rounds;
    @%ends bra END;
WAIT:
    ld.volatile.global.u64 %asked, [%at];
    mov.u64 %now, %globaltimer;
    setp.ge.u64 %ends, %now, %deadline;
    @%ends bra END;
    setp.lt.u64 %again, %asked, %round;
    @%again bra WAIT;
    st.volatile.global.u64 [%pong], %now;
    add.u64 %pong, %pong, 8;
    add.u64 %round, %round, 1;
    bra NEXT;
END:
    mov.u64 %now, 1;
    st.volatile.global.u64 [%at+16], %now;
    ret;
}
"""
