from rl.commands.export import main

raise SystemExit(main())
