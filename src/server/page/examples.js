// Problems of models/dsa-nano/eval.jsonl, whose answers the model knows: facts among noise, then a
// question. The bare form is what the model was trained on: no chat template.

export const EXAMPLES = [
  {
    name: 'Recall in 4,054 tokens',
    answer: '47',
    prompt:
        'uxcnc th\nowf tlz\nzlk=29;\nludbfov\nmqr=06;\nkcomjsmffz   wp mqa=28;\nmxu=35;\n' +
            'oahxuqt\ntxa=66;\ncmimvrdclda=80;\nzwwmlast  w j o\ngyiffmj\nwdehgfk\n' +
            'piidsfygzcp=57;\nzlr=03;\nlxu=93;\nabxlc pg ceefa \nh q gylkmelcbwvwwgixsym\n' +
            'zdk=15;\n eklguica zkjxbn{cxunxbklnktwrv}luhmciq\ntcs=11;\nzlr=95;\nbfqdykv\n' +
            'tdk=68;\n zlo p o xt bvs\nwwk=94;\nqtfo jifmcr=66;\n' +
            'vwqj pjmhwj zbmxfyf cbdg{jwyfkisticzcnr}ycwoq hmuds=39;\nwda=56;\nuwa=36;\n' +
            'mwu=75;\nlil t qpzxs=00;\n als  halwp=82;\nnz mrwu\ngyubmk \nj wvgqt\n' +
            ' gj iidywdr=62;\nwck=68;\nhgodzfsfv  gfbg\ngzgiqte asm  m uzcs=38;\n' +
            ' fkptluxmwp=72;\nlqs=07;\nv sbr r\nbkemvre\nk  ogx \nlwr=55;\ntxs=77;\nlxa=43;\n' +
            'wkfd zihwhtevvgzmdk=58;\nuqk=21;\nqz gt kymdk=40;\nmxs=49;\nlwa=76;\nijgwhqs\n' +
            'mwu=43;\nucr=58;\nwlk=57;\ny xq xz\nzdk=61;\nzws=50;\ntxa=85;\nnrhsdiyazqr=58;\n' +
            'cwofyts\nuxr=34;\nulu=49;\nwdr=70;\nnzshutx\nuqu=72;\n oggg bhrifrcgeluqa=78;\n' +
            'ok kurf\npqwhilg\nwls=75;\nulk=15;\nghca qeoyugqa dazcp=84;\n' +
            'plw v fjhfdm eywtwtchmj\nxiebhxv\nlrqfaov\nwqa=77;\ntlc  zcdwwu=70;\ntdr=96;\n' +
            'lxu=39;\ntwgcsksfzcr=13;\ndccfczj\nzwr=02;\npjwvbnlxvm mkfb\ntda=19;\nkbj a w\n' +
            'moumsmf\n{kiscgncshyapiz}zda=04;\npxoi i ooeyrzc  zxa=65;\n ofgf ktkccogc \n' +
            'tqp=81;\nwxu=80;\ngpwmyxg\ntxk=48;\nb kwytxozws=84;\ncxezqzpdmwk=77;\n' +
            'uio clawzls=77;\n aqt fz\nzcu=35;\nzlk=28;\nuqp=09;\nmqa=97;\nrjyqwod\nzwk=48;\n' +
            'zlp=20;\nwdk=34;\ntdk=06;\nqwm gno\nlcs=80;\n?mcr:66\n?txk:48\n?wda:56\nlhj vu \n' +
            'mdr=84;\nuwa=57;\n{slchfgkswyjryc}mxk=28;\nmqa=69;\n' +
            '  e jfyiggezicyxiom iyuttcr=34;\nmqa=50;\n{fvfaihcoscuwbp}tdu=23;\nlck=27;\n' +
            'txr=56;\nmcs=77;\n  mk ng\nwcu=90;\nldr=00;\nczwjas \nkmvf ak lwu=96;\nzqk=06;\n' +
            'm  novwelxr=43;\nzcr=59;\nldcxdnshwla=73;\n{zxevbigtmkutdb}wjbf enywwr=20;\n' +
            'mqp=81;\nlqs=59;\nlqu=94;\nmwczvbv\nf pkzv \nwclyndmwzds=90;\neujj hw\nllp=99;\n' +
            'wqa=57;\nmcp=35;\nwqk=30;\nwx iaylediys ub\ncnctsnk tds=22;\nlwa=67;\nuwa=83;\n' +
            ' c tild wds=24;\n?mqr:06\n?mqp:81\n?zws:84\nnkcqakeockt o q\nwls=92;\n' +
            'bdrsgdqdzvmvqmz\nmqa=61;\nmxp=06;\nwca=94;\npxsgxyvltds=22;\neldrib fzxk=79;\n' +
            ' zget p\nxtowdua\ngrqesbcgmxs=76;\n npgxrj\nzlmzoweiindapoa  zndipypxk xyhs\n' +
            'wxa=23;\nuxr=90;\nlds=26;\nzze yju\nuwu=22;\nlqa=27;\nldr=60;\ntlk=25;\nzda=25;\n' +
            'ujgpo jwndhnzk jmwr=32;\nwxk=48;\nzcr=54;\nkjedpdsqy lw zpcutxsz fxzcu=79;\n' +
            'zdr=65;\nwv i hgxxnwq b vbhkgtqlluws=36;\ni q t y\nwxu=73;\nzqk=99;\n' +
            'd qzceif*fvfa:ihcoscuwbp\nkfjsbp\nriliso rtxa=40;\ntlr=55;\ncqve j   vead n\n' +
            'ucu=11;\ntck=17;\nmda=69;\nekxuolr\n+mqr,wdr:06+70=076\nxmqu\nmck=79;\nuxk=88;\n' +
            'zds=62;\nu chwi vlcu=01;\naphr  ry?txs:77\n?mxs:76\n?lds:26\nucr=27;\n' +
            'ubcnwleljpnkbwa\ny mghqrmqvgr myhmcp=73;\n thrhu \nwqa=88;\nlqr=98;\ntkagfdn\n' +
            'gcpaps \nwb  rz \nzcr=10;\nzqs=97;\nke zb i\nmqk=95;\nmwr=49;\nwda=05;\nucp=59;\n' +
            'tdu=20;\nwca=96;\n+lqa,wds:27+24=051\nst s lws=59;\nwxs=90;\nmydgxy \nlmomv  \n' +
            'iwsbhif xddjoci\nvc jm d\n ogulvf tqk=50;\nfemdwdifuls=69;\nzxijq r\n' +
            '  ztbcmu sus  z gxdkodi\nwcr=55;\nudu=03;\netohqw mucs=85;\nulp=82;\nwwp=56;\n' +
            '+mdr,wck:84+68=152\ns w \n{lzmzadxfpvklwx}nypgnxr\nxapyhbc\nmqa=26;\nytfdw t\n' +
            'wws=11;\nwda=39;\nzdr=22;\nlxr=07;\norq jy ztqs=83;\njn  j d\npdhrf z\ntcu=59;\n' +
            'wudfity\nllr lw oockzfxa\n{jmthzgwbqflcya}uxp=36;\nzck=50;\nzvgc plioao nbk\n' +
            '{zmgysywjtgwubb}kcno grxlxr=47;\nwqk=93;\nwwa=39;\n fryfvl\ngwlf if\nmda=65;\n' +
            'nhxcssc\ntdr=56;\nmxu=62;\n yclpv \njo  fbaku rosmj mcs=24;\nuqa=74;\nulp=06;\n' +
            's pezv \ncho  ke\nldu=14;\nwxr=47;\nvum tlv\nysbe vmexssalnstwxa=30;\n' +
            'hsqlegh lxp=18;\ncrioqym txp=61;\nzwr=95;\nbgjrddfswictpdw cpzi ky\n' +
            'gbhqcpjwldk=32;\n{fmlhzhdeufnulm}mda=25;\ntqk=95;\ntcs=45;\nzdk=21;\n' +
            '  u wizazxr=27;\ntwr=72;\nzlr=27;\nzqk=93;\nzwk=02;\nohftn cfjp lkjf\nmlk=66;\n' +
            'e tu iiqucp=84;\nzds=96;\ntxk=55;\nwlr=01;\nlls=08;\nuda=52;\nebe w b\nlwk=27;\n' +
            'lds=71;\nkjedbi \nmlr=14;\nzwa=51;\nzws=56;\nmwuos  \n' +
            '{rpddhcpbruoufv}x q rafr{oajhfkamixfcjc}zca=02;\nclute c\nuxp=14;\n' +
            'h ic zhkdq w qe\ntwa=01;\nxuljm c\na cemj ey e jyl mqr=54;\nryyx sd wqs=34;\n' +
            'rcmvnve\nd nsoh \ncusuklpfijp ibl\nlwk=54;\n aycf t\noiu gxm\n  riptr\ntdu=11;\n' +
            'btk mlz\n ln htikerxqfpu\nrrh bva\natz mozptnlvybw\nzxp=22;\n xekohx\nlck=59;\n' +
            'mqu=08;\nlqp=28;\nuxp=13;\nzck=94;\nlj cekb\nuqk=48;\ntqp=79;\n?lxa:43\n?mdk:40\n' +
            '?lqs:59\nzlu=48;\nvjgk hxmmcp=19;\nwcr=74;\nuwa=79;\nt utxvd\n erdkiifuds=28;\n' +
            'macfmnxf{inwwnmcnjttkqm}lwu=40;\ntcu=94;\ngx uxbj\njdzjm vdzxu=64;\nlwk=66;\n' +
            'nc hioz  f  rey\nlds=14;\nwcr=22;\nuqu=60;\nlflkji \nwda=89;\nlwk=39;\nwws=73;\n' +
            'md g xu\n h oah  mwu=87;\ntqr=42;\n zvkruq\niimdleauwcs=80;\n?wxr:',
  },
  {
    name: 'Recall two and add',
    answer: '55+10=065',
    prompt:
        ' qbieur\nqbqw  l\nautvb n\nnnf=80;\nziu=93;\ntyk=42;\njgw=12;\nntf=31;\nnknmoec\n' +
            'zgf=69;\ndn ail zbjthjdcz{nctzhysqfshzqd}ryw=10;\nnnz=20;\nziw=90;\ntyw=22;\n' +
            'zxf=96;\nmongsfk\ntnw=95;\ntvtq  gcaque dq syf=45;\nsnz=58;\nwfc zhj\nnnw=12;\n' +
            'niz=40;\nrxu=88;\nrgk=07;\n?zgf:69\n?nnz:20\n?nnw:12\njnz=84;\njif=10;\ntnc=36;\n' +
            '?tyk:42\n?rgk:07\n?tnw:95\n?tyk:42\n?nnf:80\n?jgw:12\nsanci e jxc=70;\n' +
            'rrtsk rnjiw=93;\nniw=85;\nnnc=55;\n?rgk:07\n?ziu:93\n?nnz:20\nsif=41;\njyk=04;\n' +
            'riu=93;\n+syf,jif:45+10=055\nvpp \n?tyw:22\n?sif:41\n?snz:58\n' +
            '{qtvhbkmycxknph}zif=63;\nriz=68;\njgk=89;\nric=67;\n+jnz,ziu:84+93=177\nqgox\n' +
            ' suur z\nwgxxvg \nxkfq   griu=22;\njyc=68;\njtu=11;\n?jyk:04\n?tyk:42\n?nnz:20\n' +
            'jrmdm n\nrtc=49;\njyf=20;\n?syf:45\n?jiw:93\n?niw:85\n?nnz:20\n?rxu:88\n?nnf:80\n' +
            '?riz:68\n?nnz:20\n?syf:45\n?ziw:90\n?jyf:20\n?niz:40\ni fz jr\njgz=57;\n' +
            'gi af wytnf=39;\nrgz=01;\nnyz=16;\ntxw=12;\ngcgej hun lvg q\n' +
            '{nezvwdumyxqvpw}ric=85;\njmobu  \nsnc=73;\nzyu=65;\n?jif:10\n?rxu:88\n?jgz:57\n' +
            '?riu:22\n?tyk:42\n?jgw:12\n?ric:85\n?jnz:84\n?snc:73\nygxcnwspzgu=76;\ntyf=93;\n' +
            '+tyk,jyk:42+04=046\ntnhq\n+nnc,ryw:',
  },
  {
    name: 'Add',
    answer: '123',
    prompt:
        ' lvbugl pmzzob\n si swwptuv=66;\ntuv=83;\nwop=67;\nuvgwojwrtrn=33;\nvup=94;\n' +
            '?tuv:83\n?tuv:83\n?wop:67\n{ipgexqcxtiqwgt}wui=54;\n+wui,tuv:54+83=137\nfokv\n' +
            '#11+11=022\n#48+65=113\ntb?wop:67\n?vup:94\n?wop:67\n?wui:54\n?wop:67\n?vup:94\n' +
            '#31+92=',
  },
];
