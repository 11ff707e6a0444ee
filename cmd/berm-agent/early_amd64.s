#include "textflag.h"

// The kernel's stack is as it was when Go begins. Below it is room for the argument, as
// Go's functions expect it, and the way back.
TEXT ·enter(SB),NOSPLIT|NOFRAME,$0
	MOVQ	SP, AX
	ANDQ	$~15, SP
	SUBQ	$16, SP
	MOVQ	AX, 8(SP)
	XORPS	X15, X15
	MOVQ	·early(SB), DX
	MOVQ	(DX), CX
	CALL	CX
	MOVQ	8(SP), SP
	JMP	_rt0_amd64_linux(SB)
